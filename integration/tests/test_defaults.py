# SPDX-License-Identifier: Apache-2.0
"""With the settings of users, FlexKV decides which hits it loads. Other tests load all of them,
because they count hits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from integration.harness import connector
from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.harness.host import EngineHost
from integration.tests.corpus import CONCURRENT, LONG, Tokens
from integration.tests.reference import Reference
from integration.tests.steps import ask, ask_each, ask_together, whole_blocks

TRIES = 100
"""More than FlexKV leaves hits before it doubts a rate and measures it again."""


@pytest.fixture
def engine(
    host: EngineHost,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
) -> Engine:
    """With nothing cached anywhere, and no rate measured yet."""
    return host.get(engine_config(connector.plugin(**flexkv(always_load=False))))


@contextmanager
def busy_cores() -> Iterator[None]:
    """Two other processes compute on the cores of the engine."""
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(2)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def loaded_at_last(engine: Engine, reference: Reference, prompt: Tokens) -> int:
    """After how many requests that compute it the hit of a prompt is loaded; `TRIES` if never."""
    for tries in range(TRIES):
        engine.forget()
        answer = ask(engine, prompt)
        reference.check(prompt, answer, what=f"try {tries}")
        if answer.cached_tokens == min(whole_blocks(len(prompt)), len(prompt) - 1):
            return tries
    return TRIES


def test_hits_are_loaded_when_the_engine_was_busy_before(
    engine: Engine, reference: Reference
) -> None:
    """Its first loads lasted long steps, on cores that others used."""
    with busy_cores():
        reference.check_all(LONG, ask_each(engine, LONG), what="cold")
        engine.forget()
        together = [*LONG, *CONCURRENT]
        reference.check_all(together, ask_together(engine, together), what="beside others")
    for prompt in LONG:
        assert loaded_at_last(engine, reference, prompt) < TRIES
