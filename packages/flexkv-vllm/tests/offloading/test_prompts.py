# SPDX-License-Identifier: Apache-2.0
"""Which hits are loaded under vLLM's OffloadingConnector, and what is reported of requests."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from disk_world import PROMPT_BLOCKS, Hang, fill, hits, prompts
from engine_world import TOKEN_SECONDS, random_prompt
from kv_pages import BLOCK_TOKENS
from offloading_world import HYBRID, SEVERAL_GROUPS, WINDOW, MakeOffloadingWorld
from patience import wait_until

from flexkv.engine.choice import chooser
from flexkv.engine.choice.cost import Span, StepTimer
from flexkv.figures.definitions import REASONS, sample
from flexkv.plan.read import read_trace
from packages.inside import assert_no_fetch, chooser_of
from packages.inside_adapters import failures_of

LONG, SHORT = 600, 40
BLOCK_BYTES = 128 * BLOCK_TOKENS
"""Of a group of the tests' model, over all ranks."""
LONG_HIT, SHORT_HIT = LONG // BLOCK_TOKENS * BLOCK_TOKENS, SHORT // BLOCK_TOKENS * BLOCK_TOKENS


def test_loads_that_were_slow_are_measured_again(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    """Nothing but slow loads were seen. After 16 hits that are computed a part of one is loaded,
    and from then on all are."""
    world = make_offloading_world(num_blocks=128, slots=256, budget=1024)
    prompt = random_prompt(random.Random(4), LONG)
    world.generate(prompt)
    world.believe(1.0)
    hits = []
    for _ in range(20):
        world.forget()
        hits.append(world.external_tokens[world.generate(prompt)])
    assert hits[:16] == [0] * 16
    assert 0 < hits[16] < LONG_HIT
    assert hits[17:] == [LONG_HIT] * 3
    total = world.collected()
    left = 16 * LONG_HIT + LONG_HIT - hits[16]
    assert {why: total[sample("skipped_tokens", why)] for why in REASONS} == {
        "short": 0,
        "slow": left,
        "awaited": 0,
        "delayed": 0,
    }
    assert total[sample("hit_tokens", "host")] == sum(hits)
    assert total[sample("query_tokens", "host")] == 21 * LONG
    assert total["saved_prefill_seconds"] == pytest.approx(sum(hits) * TOKEN_SECONDS)
    world.check_outputs()


@SEVERAL_GROUPS
def test_with_several_groups_a_whole_hit_measures_again(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    world = make_offloading_world(num_blocks=128, slots=256, budget=1024, windows=(WINDOW,))
    prompt = random_prompt(random.Random(5), LONG)
    world.generate(prompt)
    world.believe(1.0)
    hits = []
    for _ in range(18):
        world.forget()
        hits.append(world.external_tokens[world.generate(prompt)])
    assert hits == [0] * 16 + [LONG_HIT] * 2
    assert world.collected()[sample("skipped_tokens", "slow")] == 16 * LONG_HIT
    world.check_outputs()


@SEVERAL_GROUPS
def test_of_a_window_only_the_needed_blocks_are_judged(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    """All blocks of the full layer and three of the window load a little faster than they are
    computed."""
    world = make_offloading_world(num_blocks=128, slots=256, budget=1024, windows=(WINDOW,))
    prompt = random_prompt(random.Random(15), LONG)
    world.generate(prompt)
    world.forget()
    world.believe((LONG_HIT / BLOCK_TOKENS + 4) * BLOCK_BYTES / (LONG_HIT * TOKEN_SECONDS))
    assert world.external_tokens[world.generate(prompt)] == LONG_HIT


def test_every_hit_is_loaded_if_the_settings_say_so(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    world = make_offloading_world(
        num_blocks=128, slots=256, budget=1024, settings={"always_load": True}
    )
    prompt = random_prompt(random.Random(5), LONG)
    world.generate(prompt)
    world.believe(1.0)
    world.forget()
    assert world.external_tokens[world.generate(prompt)] == LONG_HIT


@HYBRID
def test_hits_that_are_too_short_are_counted(
    make_offloading_world: MakeOffloadingWorld, windows: tuple[int, ...]
) -> None:
    world = make_offloading_world(
        settings={"min_load_tokens": SHORT_HIT + 1}, num_blocks=128, slots=256, windows=windows
    )
    rng = random.Random(6)
    long, short = random_prompt(rng, LONG), random_prompt(rng, SHORT)
    for prompt in (long, short):
        world.generate(prompt)
    world.forget()
    assert [world.external_tokens[world.generate(prompt)] for prompt in (short, long)] == [
        0,
        LONG_HIT,
    ]
    total = world.collected()
    assert total[sample("skipped_tokens", "short")] == SHORT_HIT
    assert total[sample("skipped_tokens", "slow")] == 0


def test_a_part_of_a_large_block_is_judged_as_such(
    make_offloading_world: MakeOffloadingWorld,
) -> None:
    """vLLM has the first 40 of 256 tokens, in the middle of a block."""
    world = make_offloading_world(chunk=4, settings={"min_load_tokens": 256 - 32 + 1})
    prompt = random_prompt(random.Random(3), 256)
    world.generate(prompt)
    world.forget()
    world.generate(prompt[:40], max_tokens=1)
    assert world.external_tokens[world.generate(prompt)] == 0
    assert world.collected()[sample("skipped_tokens", "short")] == 256 - 32
    world.check_outputs()


def test_hits_wait_for_full_steps_only_if_enough_other_requests_gain(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_offloading_world(num_blocks=256, slots=256, budget=1024)
    rng = random.Random(7)
    prompt = random_prompt(rng, LONG)
    for _ in range(2):  # the second measures a load
        world.generate(prompt)
        world.forget()
    computing = LONG_HIT * TOKEN_SECONDS
    # Between what computing delays three and six requests; vLLM schedules no step ahead here.
    monkeypatch.setattr(StepTimer, "step_seconds", 4.5 * computing)
    hits = []
    for others in (2, 5, 0):
        world.forget()
        for _ in range(others):
            world.add(random_prompt(rng, 20), max_tokens=8)
        hits.append(world.external_tokens[world.generate(prompt, max_tokens=1)])
        world.run()
    assert hits == [0, LONG_HIT, LONG_HIT]
    assert world.collected()[sample("skipped_tokens", "delayed")] == LONG_HIT
    world.check_outputs()


def test_a_request_that_has_ended_is_no_other(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM tells its manager of the end with the next step."""
    world = make_offloading_world()
    prompt = random_prompt(random.Random(14), 200)
    world.generate(prompt)
    chooser = chooser_of(world.side)
    choose_load = chooser.choose_load
    counted = []

    def note(*args: Any, others: int, **options: Any) -> Any:
        counted.append(others)
        return choose_load(*args, others=others, **options)

    monkeypatch.setattr(chooser, "choose_load", note)
    for running in (0, 2):
        world.forget()
        ended = world.add(random_prompt(random.Random(16), 20), max_tokens=30)
        world.step()
        counted.clear()
        world.abort(ended)
        for _ in range(running):
            world.add(random_prompt(random.Random(running), 20), max_tokens=30)
        world.generate(prompt, max_tokens=1)
        world.run()
        assert counted == [running]


def test_loads_are_measured_by_what_workers_report(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_offloading_world(ranks=2)
    rng = random.Random(8)
    prompt = random_prompt(rng, LONG)
    world.generate(prompt[:SHORT])
    world.forget()
    for late in world.slow_down(rng):
        monkeypatch.setattr(late, "copy_seconds", lambda ticket: 2.0**-20)
    rates: list[float] = []
    monkeypatch.setattr(chooser_of(world.side), "loaded", rates.append)
    world.generate(prompt[:SHORT])
    # Both ranks load at once, half of the bytes each.
    assert rates
    assert set(rates) == {SHORT_HIT * 128 / 2 * 2.0**20}


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_steps_are_timed_in_order(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    world = make_offloading_world(budget=64, lag=random.Random(9) if ahead else None)
    chooser = chooser_of(world.side)
    begun: dict[int, list[Span]] = {}
    ended: list[int] = []
    begins, ends = chooser.step_begins, chooser.timer.ended

    def note(spans: Any) -> int:
        number: int = begins(spans)
        begun[number] = list(spans)
        return number

    monkeypatch.setattr(chooser, "step_begins", note)
    monkeypatch.setattr(chooser.timer, "ended", lambda number: (ended.append(number), ends(number)))
    behind = set()
    for length in (150, 70):
        world.add(random_prompt(random.Random(length), length), max_tokens=3)
        while world.scheduler.has_requests():
            world.step()
            behind.add(chooser.steps_behind)
    tokens = [span for spans in begun.values() for span in spans]
    assert sum(span.tokens for span in tokens) == pytest.approx(220, abs=4)
    assert {span.start for span in tokens} >= {0, 64, 128}
    assert [number for number in ended if number] == sorted(begun)
    assert max(behind) == (2 if ahead else 1)


def test_waiting_for_a_slow_disk_is_cut(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hangs. The request computes long before its read counts as hung."""
    world = make_offloading_world(slots=14, disk_slots=100)
    texts = prompts(10, 4)
    fill(world, texts)
    monkeypatch.setattr(chooser, "_PROBE_SECONDS", 0.0)
    monkeypatch.setattr(chooser, "PROBE_SHARE", 0.0)
    hang = Hang(world)
    waiting = world.add(texts[0])
    world.step()
    wait_until(lambda: hang.begun, world.poll)
    world.run()
    assert world.external_tokens[waiting] == 0
    assert world.cache.counters.stalled_fetches == 0
    hang.end()
    assert_no_fetch(world.cache)
    assert world.collected()[sample("skipped_tokens", "awaited")] == PROMPT_BLOCKS * BLOCK_TOKENS
    world.check_outputs()


def test_hits_are_counted_by_tier(make_offloading_world: MakeOffloadingWorld) -> None:
    world = make_offloading_world(slots=14, disk_slots=200)
    texts = prompts(11, 6)
    fill(world, texts)
    assert [hits(world, text) for text in texts] == [PROMPT_BLOCKS] * len(texts)
    total = world.collected()
    tokens = PROMPT_BLOCKS * BLOCK_TOKENS
    assert total[sample("hit_tokens", "disk")] >= 4 * tokens
    both = total[sample("hit_tokens", "disk")] + total[sample("hit_tokens", "host")]
    assert both == len(texts) * tokens
    assert total[sample("query_tokens", "host")] == 2 * len(texts) * (tokens + 5)


def test_a_failed_fetch_does_not_count(make_offloading_world: MakeOffloadingWorld) -> None:
    minimum = PROMPT_BLOCKS * BLOCK_TOKENS + 1
    world = make_offloading_world(settings={"min_load_tokens": minimum}, slots=14, disk_slots=200)
    texts = prompts(7, 12)
    fill(world, texts)
    assert [hits(world, text) for text in texts] == [0] * len(texts)
    assert world.cache.counters.fetched_blocks > 0
    total = world.collected()
    assert total[sample("failures", "internal", "")] == 0
    assert total[sample("skipped_tokens", "short")] > 0
    world.check_outputs()


@HYBRID
def test_requests_are_recorded(
    make_offloading_world: MakeOffloadingWorld, tmp_path: Path, windows: tuple[int, ...]
) -> None:
    path = tmp_path / "trace.jsonl"
    world = make_offloading_world(
        num_blocks=128, slots=128, windows=windows, settings={"trace": str(path)}
    )
    prompt = random_prompt(random.Random(12), 200)
    world.generate(prompt, max_tokens=3, params={"flexkv.session": "one"})
    world.forget()
    world.generate(prompt[:100], max_tokens=20, params={"flexkv.session": "one"})
    world.generate(prompt, max_tokens=1)
    world.close()
    read = read_trace(str(path))
    first, second, third = read.trace.requests
    assert [each.prompt_tokens for each in (first, second, third)] == [200, 100, 200]
    assert [each.output_tokens for each in (first, second, third)] == [3, 20, 1]
    assert first.session == second.session != third.session
    assert (len(first.blocks), len(second.blocks)) == (12, 6)
    assert list(first.blocks[:6]) == list(second.blocks[:6])
    assert read.measured is not None
    loaded = world.external_tokens
    assert read.measured.hit_tokens == sum(loaded.values()) > 0
    assert read.measured.engine_tokens > 0


def test_a_mode_of_loads_has_no_effect_and_is_said_to_have_none(
    make_offloading_world: MakeOffloadingWorld, caplog: pytest.LogCaptureFixture
) -> None:
    make_offloading_world()
    assert not any("load_mode" in each for each in caplog.messages)
    make_offloading_world(settings={"load_mode": "layerwise"})
    (line,) = (each for each in caplog.messages if "load_mode" in each)
    assert "load_mode: set, but without effect" in line


def test_of_the_options_of_requests_only_the_mode_of_loads_is_ignored(
    make_offloading_world: MakeOffloadingWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_offloading_world()
    for params in ({"flexkv.load_mode": "layerwise"}, {"flexkv.returns": True}):
        world.generate(random_prompt(random.Random(13), 40), params=params)
    (line,) = (each for each in caplog.messages if "ignored" in each)
    assert "flexkv.load_mode" in line
    assert world.collected()["ignored_parameters"] == 1


def test_an_unknown_request_is_no_error(make_offloading_world: MakeOffloadingWorld) -> None:
    """vLLM ends requests that its connector has never seen."""
    world = make_offloading_world()
    context: Any = SimpleNamespace(req_id="other", kv_transfer_params=None)
    world.manager.on_new_request(context)
    world.manager.on_request_finished(context)
    assert failures_of(world.manager) == {}
