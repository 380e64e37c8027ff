# SPDX-License-Identifier: Apache-2.0
"""SGLang's router in front of real engines."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from integration.harness.ports import hold_port

START_SECONDS = 60.0
_CALL_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Routed:
    """What an engine answered through the router.

    Attributes:
        tokens: its answer.
        from_host: prompt tokens that it loaded from host memory.
    """

    tokens: list[int]
    from_host: int


class SglangRouter:
    """The router; a context manager that ends it.

    Args:
        python: that has it.
        engines: their URLs.
        policy: by which it chooses one.
        log: receives what it prints.
    """

    def __init__(self, python: Path, engines: Sequence[str], policy: str, log: Path) -> None:
        self._ending = contextlib.ExitStack()
        ports = [self._ending.enter_context(hold_port()).getsockname()[1] for _ in range(2)]
        self._url = f"http://127.0.0.1:{ports[0]}"
        self._log = log
        output = self._ending.enter_context(log.open("w"))
        self._process = subprocess.Popen(
            [
                *(python, "-m", "sglang_router.launch_router", "--policy", policy),
                *("--host", "127.0.0.1", "--port", str(ports[0])),
                *("--prometheus-port", str(ports[1]), "--worker-urls", *engines),
            ],
            stdout=output,
            stderr=output,
        )
        late = time.monotonic() + START_SECONDS
        while not self._serves(len(engines)):
            assert self._process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < late, log.read_text()[-4000:]
            time.sleep(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._ending.close()

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Routed:
        """The greedy answer to a prompt, from whichever engine the router chooses."""
        asked = {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0},
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{self._url}/generate", json.dumps(asked).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=_CALL_SECONDS) as answer:
            given = json.load(answer)
        sources = given["meta_info"].get("cached_tokens_details") or {}
        return Routed(given["output_ids"], sources.get("host", 0))

    def _serves(self, engines: int) -> bool:
        """Whether it knows all engines, and takes requests."""
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self._url}/workers", timeout=_CALL_SECONDS) as answer,
        ):
            known = json.load(answer)["workers"]
            return len([each for each in known if each["is_healthy"]]) == engines
        return False
