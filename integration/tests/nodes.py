# SPDX-License-Identifier: Apache-2.0
"""Engines as nodes of a cluster: each has an arena and folders of its own, and shares stores."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from integration.harness import connector
from integration.harness.answers import Completion, Generation
from integration.harness.config import EngineConfig
from integration.harness.connector import Connector
from integration.harness.engine import Engine
from integration.tests import disks
from integration.tests.corpus import FLEXKV_BLOCK, NEW_TOKENS, Tokens
from integration.tests.steps import ask, have_told, whole_blocks

PATIENCE_SECONDS = 600.0
"""For what hangs."""

ANSWER_SECONDS = 10.0
"""Deadline of questions. Those that are there to save time must not decide a test on a busy
machine, and a store that hangs costs a test as long."""

SETTINGS: dict[str, Any] = {
    "cpu_cache_gb": disks.gigabytes(disks.SLOTS),
    "ssd_timeout_seconds": disks.PATIENT_SECONDS,
    "mooncake_question_seconds": ANSWER_SECONDS,
    "mooncake_timeout_seconds": ANSWER_SECONDS,
    "objects_question_seconds": ANSWER_SECONDS,
    "objects_timeout_seconds": ANSWER_SECONDS,
}


class Nodes:
    """Starts nodes; a context manager that ends those that live.

    Args:
        folder: receives the folder and the log of each.
        engine_config: of the tests.
        flexkv: FlexKV's settings for the tests.
    """

    def __init__(
        self,
        folder: Path,
        engine_config: Callable[..., EngineConfig],
        flexkv: Callable[..., dict[str, Any]],
    ) -> None:
        self._folder = folder
        self._engine_config = engine_config
        self._flexkv = flexkv
        self._started: list[Engine] = []

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._started:
            engine.close()

    def start(self, *, env: dict[str, str] | None = None, **settings: Any) -> Engine:
        """A node with a small arena. FlexKV recomputes what a load does not bring.

        Args:
            env: added to the engine's environment.
            settings: of FlexKV; a `ssd_cache_dir` of "" is a folder of this node.
        """
        own = self._folder / f"node-{len(self._started) + 1}"
        settings = SETTINGS | {"runtime_dir": str(own / "run")} | settings
        if settings.get("ssd_cache_dir") == "":
            settings["ssd_cache_dir"] = str(own / "disk")
        return self.start_with(
            connector.plugin(recompute=True, **self._flexkv(**settings)), env=env
        )

    def start_with(self, chosen: Connector, *, env: dict[str, str] | None = None) -> Engine:
        """A node with a connector as it is."""
        own = self._folder / f"node-{len(self._started) + 1}"
        config = self._engine_config(chosen, env=env or {})
        self._started.append(Engine(config, own / "engine.log"))
        return self._started[-1]


def stored_blocks(prompts: Iterable[Tokens]) -> int:
    """Blocks that a cache has of prompts and their answers. Nothing computes the last token's."""
    return sum(whole_blocks(len(prompt) + NEW_TOKENS - 1) for prompt in prompts) // FLEXKV_BLOCK


def await_blocks(count: Callable[[], int], expected: int) -> None:
    """Wait until a store has so many blocks."""
    late = time.monotonic() + PATIENCE_SECONDS
    while (there := count()) < expected:
        assert time.monotonic() < late, f"{there} of {expected} blocks are there"
        time.sleep(0.05)


def store(
    engine: Engine,
    prompts: Iterable[Tokens],
    count: Callable[[], int],
    cache_salt: str | None = None,
) -> list[Completion]:
    """Ask for prompts that no node knows, each once the store has the blocks of those before it:
    what waits to be written keeps its place in host memory, which is small."""
    answers = []
    for prompt in prompts:
        expected = count() + stored_blocks([prompt])
        answers.append(ask(engine, prompt, cache_salt=cache_salt))
        await_blocks(count, expected)
    return answers


def submit_all(
    engine: Engine, prompts: Iterable[Tokens], cache_salt: str | None = None
) -> list[Generation]:
    """Have all prompts under way, the first of them computing."""
    begun = [
        engine.submit(prompt, max_tokens=NEW_TOKENS, logprobs=True, cache_salt=cache_salt)
        for prompt in prompts
    ]
    begun[0].wait_first_token()
    return begun


def await_sharing(one: Engine, other: Engine, prompt: Tokens) -> list[Completion]:
    """Wait until `other` finds what `one` stores. Returns all answers to `prompt`.

    With another salt the same prompt has other keys, so that nobody knows any blocks of it.
    """
    late = time.monotonic() + PATIENCE_SECONDS
    answers = []
    for attempt in itertools.count():
        assert time.monotonic() < late, f"{attempt} prompts were not found"
        salt = f"{one.group} {attempt}"
        answers.append(ask(one, prompt, cache_salt=salt))
        time.sleep(0.2)
        answers.append(ask(other, prompt, cache_salt=salt))
        if answers[-1].cached_tokens:
            break
    return answers


def leave_host_memory(engine: Engine, others: Iterable[Tokens]) -> None:
    """Ask for so much else that host memory, and vLLM, has nothing of before, and that no write to
    a tier, which may have died, keeps a place in host memory."""
    disks.ask_and_settle(engine, others)
    engine.forget()


def hits_by_tier(engine: Engine) -> dict[str, int]:
    """Tokens that FlexKV counts as hits, by the tier that they came from; tiers without are left
    out."""
    have_told(engine)
    return {
        metric["labels"]["tier"]: int(metric["value"])
        for metric in engine.metrics()
        if metric["name"] == "vllm:flexkv_hit_tokens" and metric["value"]
    }
