# SPDX-License-Identifier: Apache-2.0
"""vLLM's own HTTP server in processes of its own, for what only it shows: `/metrics`, KV events on
a socket, parameters in a request's JSON. It takes and gives tokens, so that it needs no tokenizer.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from integration.harness import processes
from integration.harness.answers import CALL_TIMEOUT, EngineError
from integration.harness.config import EngineConfig
from integration.harness.engine import START_TIMEOUT, STOP_TIMEOUT
from integration.harness.fork_server import ForkedProcess, fork_server


def reserve_port() -> socket.socket:
    """A socket that is bound to a TCP port and does not listen: while it is open nobody is given
    that port, but one who asks for it by number, as vLLM does with SO_REUSEADDR, can have it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


class Server:
    """A server of one engine; a context manager that ends it.

    Args:
        config: of the engine.
        log_path: receives all that its processes print.
        events: ZeroMQ endpoint that it publishes KV events on; None: it does not.

    Attributes:
        address: host and port that it listens on.

    Raises:
        EngineError: it did not start; nothing of it is left then.
    """

    def __init__(self, config: EngineConfig, log_path: Path, events: str | None) -> None:
        self.log_path = log_path
        self._reserved = reserve_port()
        port: int = self._reserved.getsockname()[1]
        self.address = ("127.0.0.1", port)
        self._url = f"http://127.0.0.1:{port}"
        arguments = config.engine_args() | {"host": "127.0.0.1", "port": port, "tokens_only": True}
        if events is not None:
            arguments["kv_events_config"] = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": events,
            }
        env = config.environment() | {"VLLM_SERVER_DEV_MODE": "1"}
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._process: ForkedProcess | subprocess.Popen[bytes]
        with log_path.open("wb") as log:
            if config.forked:
                fork = fork_server().fork_server
                self._process = fork(env, log.fileno(), _flags(arguments))
            else:
                module = "vllm.entrypoints.openai.api_server"
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, *_flags(arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=env,
                )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self, prompt: Sequence[int], max_tokens: int = 1, params: dict[str, Any] | None = None
    ) -> list[int]:
        """The tokens that follow `prompt`; `params` are its `kv_transfer_params`."""
        tokens: list[int] = self.choice(prompt, max_tokens, params)["token_ids"]
        return tokens

    def choice(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        params: dict[str, Any] | None = None,
        logprobs: int | None = None,
    ) -> dict[str, Any]:
        """As `generate`, but all that the server says: with `logprobs`, as many for each token."""
        body = {
            "token_ids": list(prompt),
            "sampling_params": {
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": logprobs,
            },
            "kv_transfer_params": params,
        }
        choice: dict[str, Any] = json.loads(self._ask("/inference/v1/generate", body))["choices"][0]
        return choice

    @property
    def session(self) -> int:
        """Session id of its processes; see `processes`."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended; vLLM's server ends when its engine does."""
        return self._process.poll() is None

    def metrics(self) -> str:
        """What Prometheus would scrape."""
        return self._ask("/metrics")

    def reset_prefix_cache(self, external: bool) -> None:
        """Empty vLLM's own cache, once none of its blocks is in use, and then FlexKV's if
        `external`. EngineError if they stay in use."""
        deadline = time.monotonic() + CALL_TIMEOUT
        while not self.try_reset(external=False):
            if time.monotonic() > deadline:
                raise EngineError("the prefix cache could not be reset: blocks are in use")
            time.sleep(0.05)
        if external:
            self.try_reset(external=True)

    def try_reset(self, external: bool) -> bool:
        """Empty vLLM's own cache, which needs none of its blocks to be in use, and FlexKV's if
        `external`, in any case. Returns whether both are done."""
        answer = self._ask(f"/reset_prefix_cache?reset_external={str(external).lower()}", {})
        return bool(json.loads(answer)["success"])

    def log(self) -> str:
        """All that it has printed so far."""
        return self.log_path.read_text(errors="replace")

    def close(self) -> None:
        """End it. Idempotent."""
        self._process.terminate()
        processes.wait_until_gone(self._process.pid, STOP_TIMEOUT)
        processes.kill_session(self._process.pid)
        self._process.wait()
        self._reserved.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self._ask("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
            else:
                return
        raise EngineError(f"the server did not start; its log ends with:\n{self.log()[-4000:]}")

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=CALL_TIMEOUT) as answer:
            text: str = answer.read().decode()
            return text


def _flags(arguments: dict[str, Any]) -> list[str]:
    """Keyword arguments of vLLM's `EngineArgs` as its command line has them."""
    flags = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is not False:
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags
