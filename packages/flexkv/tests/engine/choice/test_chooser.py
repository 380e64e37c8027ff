# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest
from fetch_states import FetchStates

from flexkv.client import FetchId, FetchState
from flexkv.engine.choice.chooser import Left, LoadChoice, LoadChooser, LoadMode
from flexkv.engine.choice.cost import Span
from flexkv.types.changes import Medium
from packages.inside import is_doubtful, prefill_of, timed_steps

BLOCK_BYTES = 1000
BLOCK_TOKENS = 100
SPAN = Span(0, 1000)
FETCHES = FetchStates()


@dataclass(slots=True)
class Clock:
    """Takes the place of the monotonic clock; moves only when told to."""

    now: float = 1000.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    return made


def make(
    mode: LoadMode,
    min_tokens: int = 0,
    *,
    always: bool = False,
    ranks: int = 1,
    on_cores: bool = False,
    loading: int = 0,
) -> LoadChooser:
    return LoadChooser(
        mode,
        min_tokens,
        always,
        BLOCK_BYTES,
        ranks,
        on_cores=on_cores,
        loading=lambda: loading,
        state_of=FETCHES.__getitem__,
        clock=time.monotonic,
    )


def loads(chooser: LoadChooser, span: Span, blocks: int) -> bool:
    """Whether a hit is loaded whole; if not, nothing of it is."""
    choice = chooser.choose_load(span, blocks)
    assert choice.blocks in (0, blocks)
    assert (choice.left is None) == (choice.blocks == blocks)
    return choice.blocks == blocks


@pytest.fixture
def chooser() -> LoadChooser:
    return make(LoadMode.AUTO)


def computes(chooser: LoadChooser, seconds: float) -> None:
    """Steps of 1,000 tokens have taken so long."""
    for _ in range(3):
        prefill_of(chooser).observe([SPAN], seconds)


def fetch(begun: float, arrived: int = 0) -> FetchId:
    """One of ten blocks that began so many seconds ago, from a disk."""
    made = FETCHES.begin(FetchState(time.monotonic() - begun, stop=10, missing={Medium.DISK: 10}))
    came(made, arrived)
    return made


def came(made: FetchId, arrived: int) -> None:
    """So many blocks of a fetch are there now."""
    if arrived:
        missing = {Medium.DISK: 10 - arrived}
        gave = {Medium.DISK: (arrived, time.monotonic())}
        FETCHES[made] = replace(FETCHES[made], arrived=arrived, missing=missing, gave=gave)


def end(chooser: LoadChooser, made: FetchId) -> None:
    """The fetch ends as it is."""
    chooser.fetched(made, FETCHES[made])


def test_what_is_not_known_is_loaded_and_waited_for(chooser: LoadChooser) -> None:
    assert loads(chooser, SPAN, 10)
    assert chooser.is_worth_waiting(fetch(100.0), SPAN)


def test_a_floor(chooser: LoadChooser) -> None:
    floor = make(LoadMode.ASYNC, 500)
    assert not loads(floor, Span(100, 599), 5)
    assert loads(floor, Span(100, 600), 5)


def test_what_is_left_says_why(chooser: LoadChooser) -> None:
    floor = make(LoadMode.ASYNC, 500)
    assert floor.choose_load(Span(100, 599), 5) == LoadChoice(0, Left.SHORT)
    computes(chooser, 1.0)
    chooser.loaded(6667)
    assert chooser.choose_load(SPAN, 10) == LoadChoice(0, Left.SLOW)
    assert chooser.choose_load(SPAN, 5) == LoadChoice(5)


def test_loads_that_are_under_way_come_first() -> None:
    behind, alone = make(LoadMode.ASYNC, loading=10), make(LoadMode.ASYNC)
    for chooser, worth in ((alone, True), (behind, False)):
        computes(chooser, 1.0)
        chooser.loaded(15_000)
        assert loads(chooser, SPAN, 10) is worth


def test_one_slow_load_decides_nothing(chooser: LoadChooser) -> None:
    """The first loads are measured before there are any hits."""
    chooser.loaded(1e9)
    computes(chooser, 1.0)
    chooser.loaded(100.0)
    assert all(loads(chooser, SPAN, 10) for _ in range(50))


def test_slow_loads_do_not_end_all_loads(chooser: LoadChooser) -> None:
    """After so many hits that were left, a few blocks are loaded, and what they take counts."""
    computes(chooser, 1.0)
    for _ in range(8):
        chooser.loaded(5000.0)  # 1 block in 0.2 s, 10 blocks in 2 s
    for _ in range(16):
        assert chooser.choose_load(SPAN, 10) == LoadChoice(0, Left.SLOW)
        chooser.left(Left.SLOW)
    assert chooser.choose_load(SPAN, 10) == LoadChoice(1, Left.SLOW)
    long = Span(0, 100_000)
    # 3 % of the 100 s that it takes to compute are 15 blocks, which say as much as all.
    assert chooser.choose_load(long, 1000) == LoadChoice(15, Left.SLOW)
    assert chooser.choose_load(SPAN, 10, whole=True) == LoadChoice(10)
    chooser.loaded(1e6)
    assert all(loads(chooser, SPAN, 10) for _ in range(50))


def test_a_link_that_is_slow_is_measured_now_and_then(chooser: LoadChooser) -> None:
    computes(chooser, 1.0)
    blocks = []
    for _ in range(8):
        chooser.loaded(5000.0)
    for _ in range(40):
        choice = chooser.choose_load(SPAN, 10)
        blocks.append(choice.blocks)
        chooser.left(Left.SLOW)
        chooser.loaded(5000.0 if choice.blocks else 0.0)
    assert blocks == [*[0] * 16, 1, *[0] * 16, 1, *[0] * 6]


def test_a_slow_rate_that_nothing_confirms_is_measured_again(
    chooser: LoadChooser, clock: Clock
) -> None:
    computes(chooser, 1.0)
    chooser.loaded(5000.0)
    clock.now += 29
    assert chooser.choose_load(SPAN, 10).blocks == 0
    clock.now += 2
    assert chooser.choose_load(SPAN, 10).blocks == 1


@pytest.mark.parametrize(("ranks", "worth"), [(1, False), (2, True)])
def test_a_load_that_takes_longer_than_computing_is_left(ranks: int, worth: bool) -> None:
    chooser = make(LoadMode.ASYNC, ranks=ranks)
    computes(chooser, 1.0)
    # Of each rank: 10 blocks take 1.5 s, or half as long with two.
    chooser.loaded(6667)
    assert loads(chooser, SPAN, 10) is worth


def test_a_step_counts_from_the_end_of_the_one_before(chooser: LoadChooser, clock: Clock) -> None:
    numbers = [chooser.step_begins([SPAN]) for _ in range(2)]
    assert len(set(numbers)) == 2
    assert 0 not in numbers
    for number in numbers:
        clock.now += 0.05
        chooser.timer.ended(number)
    # The second one waited for the first; counted from its beginning it would have taken 0.1 s.
    assert prefill_of(chooser).seconds(SPAN) == pytest.approx(0.05)


def test_steps_that_are_never_reported_are_forgotten(chooser: LoadChooser) -> None:
    for _ in range(1000):
        chooser.step_begins([SPAN])
    assert len(timed_steps(chooser)) <= 64


def test_steps_that_compute_no_prompt_are_not_reported(chooser: LoadChooser) -> None:
    assert chooser.step_begins([]) == 0


def test_a_fetch_that_is_slower_than_computing_is_cut_short(chooser: LoadChooser) -> None:
    computes(chooser, 1.0)
    # Half has come in a second: the other half takes another one, or 0.5 s to compute.
    assert not chooser.is_worth_waiting(fetch(1.0, arrived=5), SPAN)
    assert chooser.is_worth_waiting(fetch(0.4, arrived=5), SPAN)


def test_a_tier_that_was_slow_is_not_waited_for_again(chooser: LoadChooser) -> None:
    computes(chooser, 1.0)
    end(chooser, fetch(10.0, arrived=10))
    assert not chooser.is_worth_waiting(fetch(0.0), SPAN)
    for _ in range(8):
        end(chooser, fetch(0.1, arrived=10))
    assert chooser.is_worth_waiting(fetch(0.0), SPAN)


def test_what_takes_no_time_is_loaded_in_any_case(chooser: LoadChooser) -> None:
    computes(chooser, 0.0001)
    chooser.loaded(10_000_000)
    assert loads(chooser, SPAN, 10)
    assert not loads(chooser, SPAN, 100)


def test_told_to_it_loads_always() -> None:
    always = make(LoadMode.ASYNC, 500, always=True)
    computes(always, 0.1)
    always.loaded(1.0)
    assert loads(always, SPAN, 10)
    assert always.is_worth_waiting(fetch(9.0, arrived=1), SPAN)
    assert not loads(always, Span(0, 499), 5)


def test_a_slow_tier_is_tried_again_now_and_then(chooser: LoadChooser) -> None:
    computes(chooser, 1.0)
    end(chooser, fetch(1.0))
    assert asked_and_ended(chooser, 40) == [False] * 16 + [True] + [False] * 23


def test_a_tier_that_nobody_asked_for_a_while_is_tried_again(
    chooser: LoadChooser, clock: Clock
) -> None:
    computes(chooser, 1.0)
    end(chooser, fetch(1.0))
    assert asked_and_ended(chooser, 1) == [False]
    clock.now += 31
    assert asked_and_ended(chooser, 1) == [True]


def test_each_try_in_vain_waits_longer_and_comes_later(chooser: LoadChooser, clock: Clock) -> None:
    """So also a tier that takes long to begin is heard in the end, at the same cost."""
    computes(chooser, 0.1)
    end(chooser, fetch(1.0))
    allowed = []
    for _ in range(3):
        refused = 0
        while not chooser.is_worth_waiting(tried := fetch(0.0), SPAN):
            end(chooser, tried)
            refused += 1
        begun = clock.now
        while chooser.is_worth_waiting(tried, SPAN):
            clock.now += 0.001
        allowed.append((refused, pytest.approx(clock.now - begun, abs=0.002)))
        end(chooser, tried)
    assert allowed == [(16, 0.02), (32, 0.04), (64, 0.08)]
    tried = fetch(0.15, arrived=10)  # it has come, and is fast after all
    end(chooser, tried)
    computes(chooser, 10.0)
    assert chooser.is_worth_waiting(fetch(0.0), SPAN)


def asked_and_ended(chooser: LoadChooser, count: int) -> list[bool]:
    """For so many hits, one after the other, whether the first answer was to wait; nothing comes
    at once, and the requests that are to wait are aborted."""
    answers = []
    for _ in range(count):
        asked = fetch(0.0)
        answers.append(chooser.is_worth_waiting(asked, SPAN))
        if answers[-1]:
            FETCHES[asked] = replace(FETCHES[asked], begun=time.monotonic() - 0.05)
            chooser.is_worth_waiting(asked, SPAN)
        end(chooser, asked)
    return answers


def test_a_tier_that_gives_nothing_costs_a_small_share_of_computing(chooser: LoadChooser) -> None:
    computes(chooser, 1.0)
    assert chooser.is_worth_waiting(fetch(0.01), SPAN)
    assert not chooser.is_worth_waiting(fetch(0.05), SPAN)


def test_a_tier_that_was_faster_is_not_waited_for_twice(chooser: LoadChooser, clock: Clock) -> None:
    computes(chooser, 1.0)
    before = fetch(0.1, arrived=10)
    end(chooser, before)  # ten blocks in 0.1 s
    slow = fetch(0.0)
    clock.now += 0.2
    assert chooser.is_worth_waiting(slow, SPAN)
    clock.now += 0.1
    assert not chooser.is_worth_waiting(slow, SPAN)
    end(chooser, slow)
    assert not chooser.is_worth_waiting(fetch(0.0), SPAN)


def test_a_fetch_behind_others_is_not_late(chooser: LoadChooser, clock: Clock) -> None:
    computes(chooser, 3.0)
    end(chooser, fetch(0.1, arrived=10))
    before = [fetch(0.0) for _ in range(9)]
    for each in before:
        assert chooser.is_worth_waiting(each, SPAN)
    queued = fetch(0.0)
    for each in before:
        assert chooser.is_worth_waiting(queued, SPAN)
        clock.now += 0.2
        came(each, 10)
        end(chooser, each)
    assert chooser.is_worth_waiting(queued, SPAN)
    clock.now += 2.3  # twice as long as all ten take at 50 blocks a second
    assert not chooser.is_worth_waiting(queued, SPAN)


def test_a_fetch_that_hangs_is_late_while_others_come(chooser: LoadChooser, clock: Clock) -> None:
    """Say on two drives, of which one hangs."""
    computes(chooser, 1.0)
    end(chooser, fetch(0.1, arrived=10))
    hung = fetch(0.0)
    assert chooser.is_worth_waiting(hung, SPAN)
    for _ in range(3):
        clock.now += 0.1
        other = fetch(0.1, arrived=10)
        assert chooser.is_worth_waiting(fetch(0.0), SPAN)
        end(chooser, other)
    assert not chooser.is_worth_waiting(hung, SPAN)


def test_who_hangs_up_early_says_nothing_of_the_tier(chooser: LoadChooser) -> None:
    computes(chooser, 1.0)
    end(chooser, fetch(0.1, arrived=10))
    end(chooser, fetch(0.2))
    assert chooser.is_worth_waiting(fetch(0.2), SPAN)


def test_on_a_gpu_others_wait_for_short_loads_only(chooser: LoadChooser) -> None:
    chooser.loaded(1e6)
    assert chooser.is_layerwise(blocks=100, running=0)
    assert chooser.is_layerwise(blocks=5, running=1)
    assert not chooser.is_layerwise(blocks=6, running=1)


def test_on_cores_that_compute_only_short_loads_are_worth_it_alone() -> None:
    chooser = make(LoadMode.AUTO, on_cores=True)
    assert chooser.is_layerwise(blocks=100, running=0), "nothing is known"
    chooser.loaded(1e6)
    assert chooser.is_layerwise(blocks=33, running=0)
    assert not chooser.is_layerwise(blocks=34, running=0)
    assert chooser.is_layerwise(blocks=100, running=1)


def test_a_mode_that_was_set_is_kept() -> None:
    for on_cores in (False, True):
        always = make(LoadMode.LAYERWISE, on_cores=on_cores)
        never = make(LoadMode.ASYNC, on_cores=on_cores)
        always.loaded(1.0)
        assert always.is_layerwise(blocks=100, running=9)
        assert not never.is_layerwise(blocks=1, running=0)


def test_a_request_chooses_where_the_engine_can_do_both() -> None:
    wanted = (LoadMode.ASYNC, LoadMode.LAYERWISE)
    for mode in LoadMode:
        chosen = [make(mode).is_layerwise(blocks=1, running=0, wanted=each) for each in wanted]
        assert chosen == [False, mode is not LoadMode.ASYNC]
    auto = make(LoadMode.LAYERWISE)
    auto.loaded(1.0)
    assert not auto.is_layerwise(blocks=100, running=9, wanted=LoadMode.AUTO)


def runs(chooser: LoadChooser, clock: Clock, seconds: float, spans: list[Span]) -> None:
    """The engine has run a few such steps, one after the other."""
    for _ in range(4):
        number = chooser.step_begins(spans)
        clock.now += seconds
        chooser.timer.ended(number)


def saturated(clock: Clock, mode: LoadMode = LoadMode.ASYNC, **settings: bool) -> LoadChooser:
    """Steps of 4,000 tokens of prompts take 2 s, of which a hit of 1,000 would take 0.5 s."""
    chooser = make(mode, **settings)
    chooser.loaded(1e6)
    runs(chooser, clock, 2.0, [Span(0, 4000)])
    return chooser


def test_a_load_that_waits_longer_than_computing_delays_all_is_left(clock: Clock) -> None:
    chooser = saturated(clock)
    assert chooser.choose_load(SPAN, 10, others=2) == LoadChoice(0, Left.DELAYED)
    assert chooser.choose_load(Span(0, 3000), 30, others=2) == LoadChoice(30)


def test_the_more_requests_wait_the_more_is_loaded(clock: Clock) -> None:
    chooser = saturated(clock)
    chosen = [chooser.choose_load(SPAN, 10, others=others).blocks for others in range(6)]
    assert chosen == [10, 0, 0, 10, 10, 10]


def test_a_delayed_load_is_not_waited_for_either(clock: Clock) -> None:
    chooser = saturated(clock)
    assert not chooser.is_worth_waiting(fetch(0.0), SPAN, others=2)
    assert chooser.is_worth_waiting(fetch(0.0), SPAN, others=3)


def test_each_part_of_a_load_is_delayed(clock: Clock) -> None:
    """One for which host memory has room three times loads in as many parts."""
    chooser = saturated(clock)
    short = FETCHES.begin(replace(FETCHES[fetch(0.0)], reach=30))
    assert chooser.is_worth_waiting(short, SPAN, others=3)
    worth = [chooser.is_worth_waiting(short, SPAN, others=n, whole=True) for n in (9, 10, 11)]
    assert worth == [False, False, True]


def test_what_is_delayed_does_not_make_a_tier_doubtful(clock: Clock) -> None:
    chooser = saturated(clock)
    end(chooser, fetch(0.1, arrived=10))
    for _ in range(40):
        delayed = fetch(0.0)
        assert not chooser.is_worth_waiting(delayed, SPAN, others=2)
        end(chooser, delayed)
    assert not is_doubtful(chooser, Medium.DISK)


def test_a_short_delay_is_accepted(clock: Clock) -> None:
    chooser = make(LoadMode.ASYNC)
    chooser.loaded(1e9)
    runs(chooser, clock, 0.2, [Span(0, 4000)])
    assert chooser.choose_load(Span(0, 100), 1, others=2) == LoadChoice(1)
    runs(chooser, clock, 0.3, [Span(0, 4000)])
    assert chooser.choose_load(Span(0, 100), 1, others=2) == LoadChoice(0, Left.DELAYED)


def test_each_step_behind_counts(clock: Clock) -> None:
    ahead = saturated(clock)
    ahead.steps_behind = 2
    assert ahead.choose_load(SPAN, 10, others=6) == LoadChoice(0, Left.DELAYED)
    assert ahead.choose_load(SPAN, 10, others=7) == LoadChoice(10)


def test_short_steps_delay_nothing(clock: Clock) -> None:
    """The others decode, or the engine has been idle since."""
    chooser = saturated(clock)
    runs(chooser, clock, 0.02, [])
    assert loads(chooser, SPAN, 10)
    assert chooser.choose_load(SPAN, 10, others=2) == LoadChoice(10)
    idle = saturated(clock)
    assert idle.choose_load(SPAN, 10, others=2).blocks == 0
    clock.now += 4.1
    assert idle.choose_load(SPAN, 10, others=2) == LoadChoice(10)


def test_layerwise_and_demanded_loads_are_never_delayed(clock: Clock) -> None:
    for chooser in (
        saturated(clock, LoadMode.LAYERWISE),
        saturated(clock, LoadMode.AUTO),
        saturated(clock, always=True),
    ):
        assert chooser.choose_load(SPAN, 10, others=2) == LoadChoice(10)
        assert chooser.is_worth_waiting(fetch(0.0), SPAN, others=2)
