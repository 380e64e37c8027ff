# SPDX-License-Identifier: Apache-2.0
"""What is loaded under vLLM's real scheduler when loads were once measured to be slow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from disk_world import PROMPT_BLOCKS, drive_of, fill, hits, prompts
from engine_world import BLOCK_TOKENS, TOKEN_SECONDS, MakeWorld, random_prompt
from test_world_stats import collected

from flexkv.engine.choice.chooser import Left
from flexkv.engine.choice.cost import StepTimer
from flexkv.engine.scheduler.options import RequestOptions
from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.figures.definitions import REASONS, sample
from flexkv.tiers.job import Outcome
from flexkv_vllm.compat.core import fails_by_request
from packages.inside import block_bytes_of, chooser_of, index_of
from packages.inside_adapters import groups_of, keys_of_side
from packages.inside_tiers import store_of

LONG, SHORT = 600, 40
LONG_HIT, SHORT_HIT = LONG // BLOCK_TOKENS * BLOCK_TOKENS, SHORT // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_first_load_that_is_seen_late_decides_nothing(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker looks for it many steps later, each of which is long; the copy itself took as long
    as always."""
    world = make_world(num_blocks=128, slots=256, budget=1024)
    rng = random.Random(3)
    long, short = random_prompt(rng, LONG), random_prompt(rng, SHORT)
    for prompt in (long, short):
        world.generate(prompt)
    world.settle()
    world.forget()
    (late,) = world.slow_down(rng, polls=(5, 5))
    reported = []
    loaded = chooser_of(world.side).loaded
    monkeypatch.setattr(
        chooser_of(world.side), "loaded", lambda rate: (reported.append(rate), loaded(rate))
    )
    monkeypatch.setattr(late, "copy_seconds", lambda ticket: 2.0**-20)
    busy = world.add(random_prompt(rng, 20), max_tokens=100)
    first = world.generate(short, max_tokens=1)
    assert len(world.outputs[busy]) == 100
    world.run()
    assert world.external_tokens[first] == SHORT_HIT
    assert [rate for rate in reported if rate] == [SHORT_HIT * 128 * 2.0**20]
    late.polls = (0, 0)
    for _ in range(3):
        world.forget()
        assert world.external_tokens[world.generate(long)] == LONG_HIT
    world.check_outputs()


def test_loads_that_were_slow_are_measured_again(make_world: MakeWorld) -> None:
    """Nothing but slow loads were seen. After 16 hits that are computed a part of one is loaded,
    and from then on all are."""
    world = make_world(num_blocks=128, slots=256, budget=1024)
    rng = random.Random(4)
    prompt = random_prompt(rng, LONG)
    world.generate(prompt)
    world.believe(1.0)
    hits = []
    for _ in range(20):
        world.forget()
        hits.append(world.external_tokens[world.generate(prompt)])
    assert hits[:16] == [0] * 16
    assert 0 < hits[16] < LONG_HIT
    assert hits[17:] == [LONG_HIT] * 3
    total = collected(world)
    left = 16 * LONG_HIT + LONG_HIT - hits[16]
    assert {why: total[sample("skipped_tokens", why)] for why in REASONS} == {
        "short": 0,
        "slow": left,
        "awaited": 0,
        "delayed": 0,
    }
    assert total[sample("hit_tokens", "host")] == sum(hits)
    world.check_outputs()


def test_with_several_groups_a_whole_hit_measures_again(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=128, slots=256, budget=1024, windows=(48,))
    prompt = random_prompt(random.Random(5), LONG)
    world.generate(prompt)
    world.believe(1.0)
    hits = []
    for _ in range(18):
        world.forget()
        hits.append(world.external_tokens[world.generate(prompt)])
    assert hits == [0] * 16 + [LONG_HIT] * 2
    total = collected(world)
    assert total[sample("skipped_tokens", "slow")] == 16 * LONG_HIT
    world.check_outputs()


def test_hits_that_are_too_short_are_counted(make_world: MakeWorld) -> None:
    world = make_world(settings={"min_load_tokens": SHORT_HIT + 1}, slots=256)
    rng = random.Random(6)
    long, short = random_prompt(rng, LONG), random_prompt(rng, SHORT)
    for prompt in (long, short):
        world.generate(prompt)
    world.forget()
    assert [world.external_tokens[world.generate(prompt)] for prompt in (short, long)] == [
        0,
        LONG_HIT,
    ]
    total = collected(world)
    assert total[sample("skipped_tokens", "short")] == SHORT_HIT
    assert total[sample("skipped_tokens", "slow")] == 0


def test_hits_wait_for_full_steps_only_if_enough_other_requests_gain(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(num_blocks=256, slots=256, budget=1024)
    rng = random.Random(7)
    prompt = random_prompt(rng, LONG)
    world.generate(prompt)
    computing = LONG_HIT * TOKEN_SECONDS
    # Between what computing delays three and six requests; vLLM schedules no step ahead here.
    monkeypatch.setattr(StepTimer, "step_seconds", 4.5 * computing)
    hits = []
    for others in (2, 5, 0):
        world.forget()
        busy = [world.add(random_prompt(rng, 20), max_tokens=8) for _ in range(others)]
        hits.append(world.external_tokens[world.generate(prompt, max_tokens=1)])
        world.run()
        assert len(busy) == others
    assert hits == [0, LONG_HIT, LONG_HIT]
    assert collected(world)[sample("skipped_tokens", "delayed")] == LONG_HIT
    world.check_outputs()


def test_a_hit_that_came_from_disk_may_be_left_too(make_world: MakeWorld) -> None:
    minimum = PROMPT_BLOCKS * BLOCK_TOKENS + 1
    world = make_world(settings={"min_load_tokens": minimum}, slots=14, disk_slots=200)
    texts = prompts(7, 12)
    fill(world, texts)
    assert [hits(world, text) for text in texts] == [0] * len(texts)
    assert world.cache.counters.fetched_blocks > 0
    total = collected(world)
    assert total[sample("failures", "internal", "")] == 0
    assert total[sample("skipped_tokens", "short")] > 0
    world.check_outputs()


def test_reasons_of_the_metric_are_those_of_the_chooser() -> None:
    assert tuple(reason.value for reason in Left) == REASONS


@pytest.mark.skipif(not fails_by_request(), reason="this vLLM has one KV cache group here")
def test_of_a_prefix_whose_fetch_is_cut_the_part_that_came_is_judged(make_world: MakeWorld) -> None:
    """The whole would take longer to load than the part takes to compute; the part does not."""
    part, whole = 10 * BLOCK_TOKENS, 20 * BLOCK_TOKENS
    world = make_world(
        windows=(40,), num_blocks=128, slots=128, disk_slots=200, settings={"min_load_tokens": 0}
    )
    prompt = random_prompt(random.Random(8), whole + 1)
    for length in (part + 1, whole + 1):
        world.generate(prompt[:length], max_tokens=1)
        world.settle()
    world.forget()
    index = index_of(world.cache)
    full, _ = groups_of(world.side)
    tracked = TrackedRequest(world.requests["r1"], RequestOptions())
    behind = keys_of_side(world.side).of(tracked, full)[15:]
    lost = index.lease(behind)
    assert len(lost) == 5
    index.drop(lost)
    index.release(lost)
    store = store_of(drive_of(world))
    read = store.read

    def read_all_but_the_first(view: Any, keys: Sequence[bytes], *rest: Any) -> list[Outcome]:
        outcomes = list(read(view, keys, *rest))
        return [
            Outcome.FAILED if key == behind[0] else outcome
            for key, outcome in zip(keys, outcomes, strict=True)
        ]

    store.read = read_all_but_the_first
    # Ten blocks, and three for the window.
    world.believe(13 * block_bytes_of(world.cache) / (0.9 * part * TOKEN_SECONDS))
    assert world.external_tokens[world.generate(prompt)] == part
    # They came, but behind one that did not: four, and three of the window, which left with them.
    assert world.cache.counters.fetched_blocks == 4 + 3
    total = collected(world)
    assert total[sample("hit_tokens", "host")] == part
    assert total.get(sample("hit_tokens", "disk"), 0) == 0
    world.check_outputs()
