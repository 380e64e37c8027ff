# SPDX-License-Identifier: Apache-2.0
"""What the demo asks of an engine, and both engines that can do it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Protocol

from integration.harness.answers import Completion
from integration.harness.engine import Engine
from integration.sglang.server import SglangServer

WRITE_SECONDS = 120.0


class Serving(Protocol):
    """A running engine."""

    def generate(
        self, prompt: Sequence[int], *, max_tokens: int, ignore_eos: bool = True
    ) -> Completion:
        """The greedy answer to a prompt, with the time of each token."""
        ...

    def loaded_tokens(self) -> int:
        """Tokens that FlexKV, or another connector, has brought back so far."""
        ...

    def kill_when_written(self) -> None:
        """SIGKILL all its processes once FlexKV has nothing more to write."""
        ...


class VllmServing:
    """A vLLM; borrowed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def generate(
        self, prompt: Sequence[int], *, max_tokens: int, ignore_eos: bool = True
    ) -> Completion:
        return self._engine.generate(prompt, max_tokens=max_tokens, ignore_eos=ignore_eos)

    def loaded_tokens(self) -> int:
        return int(self._engine.counter("vllm:external_prefix_cache_hits"))

    def kill_when_written(self) -> None:
        deadline = time.monotonic() + WRITE_SECONDS
        while True:
            # FlexKV reports in steps, while there are requests ten times a second.
            time.sleep(0.1)
            self._engine.generate([1], max_tokens=3)
            written = not self._engine.counter("vllm:flexkv_queue_length")
            if written or time.monotonic() > deadline:
                break
        self._engine.kill()


class SglangServing:
    """An SGLang; borrowed."""

    def __init__(self, server: SglangServer) -> None:
        self._server = server
        self._loaded = 0

    def generate(
        self, prompt: Sequence[int], *, max_tokens: int, ignore_eos: bool = True
    ) -> Completion:
        done, meta = self._server.stream(prompt, max_tokens, ignore_eos=ignore_eos)
        details = meta["cached_tokens_details"] or {}
        self._loaded += int(details.get("host", 0))  # where SGLang counts what a linker loaded
        return done

    def loaded_tokens(self) -> int:
        return self._loaded

    def kill_when_written(self) -> None:
        deadline = time.monotonic() + WRITE_SECONDS
        while self._queue() and time.monotonic() < deadline:
            time.sleep(0.1)
            self._server.generate([1], 1)  # FlexKV reports as requests come
        self._server.kill()

    def _queue(self) -> float:
        """Blocks that wait to be written, as Prometheus would see it."""
        found = re.findall(r"^sglang:flexkv_queue_length\S* (\S+)$", self._server.metrics(), re.M)
        return sum(map(float, found))
