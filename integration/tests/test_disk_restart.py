# SPDX-License-Identifier: Apache-2.0
"""What is on disk outlives the engine, whether it is stopped or killed, and is never wrong."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.harness.host import EngineHost
from integration.tests import disks
from integration.tests.corpus import LONG, SALTED, WARM, Tokens
from integration.tests.disks import PROMPTS, ask_and_settle, restorable, restored
from integration.tests.reference import Reference
from integration.tests.steps import ask_each

# Under way when an engine is killed, beside prompts that the disk has. No answer ends before.
LATE = LONG + WARM + (SALTED,)
LATE_TOKENS = 4000
KILL_WITHIN = 0.05
"""Seconds: some steps of the engine."""

MOST_DAMAGED = 30
"""Blocks of one prompt: one in twenty of 51 at most, more than ten once in 10,000 prompts."""


def _kill_at_work(rng: random.Random, engine: Engine) -> None:
    """Kill all processes of an engine at some moment while it computes, reads and writes.

    The moment is one of the engine's work: after a second, a fast machine would have written over
    all that a test wants to find again.
    """
    prompts = [*PROMPTS, *LATE]
    rng.shuffle(prompts)
    generations = [engine.submit(prompt, max_tokens=LATE_TOKENS) for prompt in prompts]
    generations[rng.randrange(len(prompts) // 2)].wait_first_token()
    time.sleep(rng.uniform(0, KILL_WITHIN))
    assert not all(generation.future.done() for generation in generations), "it was idle"
    assert len(engine.kill()) >= 3


@dataclass(frozen=True, slots=True)
class Lives:
    """One engine after another on the same directory."""

    host: EngineHost
    reference: Reference
    record: Callable[[str, object], None]

    def check(
        self, config: EngineConfig, what: str, prompts: Sequence[Tokens] = PROMPTS
    ) -> tuple[Engine, list[int]]:
        """Start an engine and ask it for prompts; returns it, and the tokens restored of each."""
        engine = self.host.start(config)
        answers = ask_and_settle(engine, prompts)
        self.reference.check_all(prompts, answers, what=what)
        rate = sum(restored(answers)) / sum(restorable(prompts))
        self.record("hit rate after the restart", rate)
        print(f"{what}: {disks.warm_slots(engine)} warm slots, hit rate {rate:.1%}")
        return engine, restored(answers)


@pytest.fixture
def lives(
    host: EngineHost, reference: Reference, record_property: Callable[[str, object], None]
) -> Lives:
    return Lives(host, reference, record_property)


def _fill(engine: Engine) -> None:
    """Have all prompts on disk."""
    ask_and_settle(engine, PROMPTS)
    engine.forget()


def test_a_kill_loses_nothing_that_was_written(
    lives: Lives, disk_engine: Engine, disk_config: Callable[..., EngineConfig], disk_dir: Path
) -> None:
    """Not even if the new engine has another number of blocks and of requests at once. Then bytes
    change on disk, also after a kill: their blocks are misses."""
    first = disk_engine.config
    _fill(disk_engine)
    _kill_at_work(random.Random(1), disk_engine)
    changed = disk_config(disk_dir, num_blocks=300, max_num_seqs=3)
    engine, found = lives.check(changed, "after a kill")
    assert found == restorable(PROMPTS)
    lives.reference.check_all(LATE, ask_each(engine, LATE), what="what was under way")

    engine.forget()
    disks.settle(engine)
    rng = random.Random(2)
    _kill_at_work(rng, engine)
    _restart_over_damage(lives, first, rng, disk_dir)


def _restart_over_damage(
    lives: Lives, config: EngineConfig, rng: random.Random, disk_dir: Path
) -> None:
    assert disks.damage(rng, disk_dir, share=0.05) > 0
    code, checked = disks.run_cli("verify", str(disk_dir))
    assert code == 1
    assert checked["bad"]

    engine, found = lives.check(config, "over damage")
    assert 0 < sum(found) < sum(restorable(PROMPTS))
    assert "is wrong; it is a miss" in engine.log()
    # What was damaged is computed and written anew. A request does not wait for blocks behind one
    # that is damaged, so that others there may be found by the next one only.
    for _ in range(MOST_DAMAGED):
        engine.forget()
        again = ask_and_settle(engine, PROMPTS)
        lives.reference.check_all(PROMPTS, again, what="after the damage")
        if restored(again) == restorable(PROMPTS):
            break
    assert restored(again) == restorable(PROMPTS)


def test_a_kill_among_writes_over_older_blocks(
    lives: Lives, disk_config: Callable[..., EngineConfig], disk_dir: Path
) -> None:
    """The disk holds a third of the prompts, so every slot is written again and again."""
    config = disk_config(disk_dir, disks.TIGHT)
    engine = lives.host.get(config)
    ask_and_settle(engine, PROMPTS)
    _kill_at_work(random.Random(3), engine)
    # The last prompts were written last: asked for first, before others take their place.
    _, found = lives.check(config, "after a kill among writes", PROMPTS[::-1])
    assert sum(found) > 0
