# SPDX-License-Identifier: Apache-2.0
"""NVIDIA Dynamo as its users deploy it on a machine: frontends with its KV router, and its own vLLM
workers, each with FlexKV. Discovery is a folder, so that nothing else has to run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from integration.harness.ports import hold_port
from integration.harness.processes import kill_group

MODEL = "model"
ENGINE_BLOCK = 32
START_SECONDS = 600.0
ANSWER_SECONDS = 300.0
"""A request without an answer by then has hung."""

# Dynamo's module imports an image processor, which needs a torchvision that no CPU build has.
_WORKER = """
import runpy, sys, types
images = types.ModuleType("transformers.models.qwen2_vl.image_processing_qwen2_vl")
images.smart_resize = None
sys.modules[images.__name__] = images
sys.argv = ["dynamo.vllm", *sys.argv[1:]]
runpy.run_module("dynamo.vllm", run_name="__main__", alter_sys=True)
"""


class RefusedError(RuntimeError):
    """A frontend answered with an error, as it may while a worker is gone."""


@dataclass(frozen=True, slots=True)
class Completed:
    """An answer.

    Attributes:
        text: what follows the prompt.
        cached_tokens: tokens of the prompt that were not computed.
        seconds: until the whole answer was there.
    """

    text: str
    cached_tokens: int
    seconds: float


class Deployment:
    """Frontends and workers; a context manager that ends them.

    Args:
        python: has Dynamo, the vLLM that it pins, and FlexKV.
        model: folder of the model with its tokenizer.
        folder: receives logs, the discovery of the processes, and the disks of the workers.
        frontends: the options of each frontend's router.
        workers: how many there are.
        blocks: of each worker's own KV cache.
        settings: FlexKV's, as variables of the environment; each worker has a disk of its own.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        folder: Path,
        *,
        frontends: Sequence[Sequence[str]],
        workers: int,
        blocks: int,
        settings: Mapping[str, str],
    ) -> None:
        self._python = python
        self._model = model
        self._folder = folder
        self._blocks = blocks
        self._settings = settings
        self._holds = contextlib.ExitStack()
        (folder / "discovery").mkdir(parents=True)
        self._ports = [self._port() for _ in frontends]
        self._events = [self._port() for _ in range(workers)]
        # Dynamo reads the number as one of 16 bits, with a sign.
        self._status = [self._port(range(20_000, 1 << 15)) for _ in range(workers)]
        self._frontends = [
            self._start(
                f"frontend-{number}",
                ["-m", "dynamo.frontend", "--http-port", str(port), "--router-mode", "kv", *given],
                {},
            )
            for number, (port, given) in enumerate(zip(self._ports, frontends, strict=True))
        ]
        self._workers: list[subprocess.Popen[bytes] | None] = [None] * workers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(len(self._workers)):
            self.kill_worker(number)
        for frontend in self._frontends:
            kill_group(frontend.pid)
            frontend.wait()
        self._holds.close()

    def start_worker(self, number: int) -> None:
        """Start a worker, with the disk that it had before."""
        disk = self._folder / f"disk-{number}"
        events = {
            "publisher": "zmq",
            "topic": "kv-events",
            "endpoint": f"tcp://*:{self._events[number]}",
            "enable_kv_cache_events": True,
        }
        connector = {"kv_connector": "FlexKVConnectorV1", "kv_role": "kv_both"}
        connector["kv_load_failure_policy"] = "recompute"
        options = {
            "model": str(self._model),
            "served-model-name": MODEL,
            "max-model-len": "4096",
            "block-size": str(ENGINE_BLOCK),
            "dtype": "float32",
            "num-gpu-blocks-override": str(self._blocks),
            "kv-transfer-config": json.dumps(connector),
            "kv-events-config": json.dumps(events),
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        env = {
            "DYN_SYSTEM_PORT": str(self._status[number]),
            "FLEXKV_SSD_CACHE_DIR": str(disk),
            "FLEXKV_RUNTIME_DIR": str(self._folder / f"run-{number}"),
            **self._settings,
        }
        self._workers[number] = self._start(
            f"worker-{number}", ["-c", _WORKER, "--enforce-eager", *arguments], env
        )

    def kill_worker(self, number: int) -> None:
        """End a worker and its engine by SIGKILL. Idempotent."""
        worker, self._workers[number] = self._workers[number], None
        if worker is not None:
            kill_group(worker.pid)
            worker.wait()

    def await_workers(self, count: int) -> None:
        """Wait until every frontend knows so many workers.

        Raises:
            TimeoutError: it does not.
        """
        late = time.monotonic() + START_SECONDS
        for port in self._ports:
            while self._known(port) != count:
                if time.monotonic() > late:
                    raise TimeoutError(f"not {count} workers after {START_SECONDS:.0f} s")
                time.sleep(1.0)

    def complete(self, frontend: int, prompt: str, tokens: int) -> Completed:
        """Ask a frontend for what follows a prompt.

        Raises:
            RefusedError: it answers with an error.
            TimeoutError: it does not answer.
        """
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        url = f"http://127.0.0.1:{self._ports[frontend]}/v1/completions"
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        began = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise RefusedError(f"{error.code}: {error.read()[:200]!r}") from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise error.reason from error
            raise RefusedError(str(error.reason)) from error
        details = found["usage"].get("prompt_tokens_details") or {}
        return Completed(
            found["choices"][0]["text"],
            details.get("cached_tokens") or 0,
            time.monotonic() - began,
        )

    def metrics(self, worker: int) -> str:
        """What a worker's metrics say; empty if it does not answer."""
        url = f"http://127.0.0.1:{self._status[worker]}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                text: str = answer.read().decode()
        except OSError:
            return ""
        return text

    def _known(self, port: int) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
                found: dict[str, Any] = json.load(answer)
        except OSError:
            return 0
        instances = [each for each in found["instances"] if each.get("endpoint") == "generate"]
        return len(instances)

    def _start(
        self, name: str, arguments: Sequence[str], env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        shared = {
            "DYN_FILE_KV": str(self._folder / "discovery"),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [str(self._python), *arguments],
                env=os.environ | shared | dict(env),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )

    def _port(self, ports: range = range(1)) -> int:
        held = self._holds.enter_context(hold_port(ports))
        port: int = held.getsockname()[1]
        return port
