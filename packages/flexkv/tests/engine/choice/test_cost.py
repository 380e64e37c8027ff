# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv.engine.choice.cost import LinkPace, PrefillPace, Span

RATES = st.floats(1e-7, 1e-2)


@given(RATES, st.floats(0, 1e-6), st.lists(st.integers(64, 8192), min_size=4, max_size=40))
def test_both_rates_are_found(per_token: float, per_pair: float, sizes: list[int]) -> None:
    pace, start = PrefillPace(), 0
    for size in sizes:
        span = Span(start, start + size)
        pace.observe([span], per_token * span.tokens + per_pair * span.pairs)
        start = 0 if start > 20_000 else start + size
        expected = per_token * span.tokens + per_pair * span.pairs
        assert pace.seconds(span) == pytest.approx(expected, rel=0.35)
    if len(set(sizes)) > 3:
        far = Span(0, 4096)
        expected = per_token * far.tokens + per_pair * far.pairs
        assert pace.seconds(far) == pytest.approx(expected, rel=0.35)


def test_nothing_is_known_at_first() -> None:
    pace = PrefillPace()
    pace.observe([Span(0, 10)], 1.0)  # a few tokens beside the cost of a step
    pace.observe([], 1.0)
    assert pace.seconds(Span(0, 1000)) is None
    assert LinkPace().seconds(1) is None


def test_steps_that_are_alike_give_their_own_rate() -> None:
    pace = PrefillPace()
    for _ in range(10):
        pace.observe([Span(0, 500)], 0.5)
    assert pace.seconds(Span(0, 500)) == pytest.approx(0.5)
    assert pace.seconds(Span(0, 1000)) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.integers(64, 5000), st.floats(1e-4, 10)), min_size=1, max_size=30))
def test_no_rate_is_negative(steps: list[tuple[int, float]]) -> None:
    pace = PrefillPace()
    for tokens, seconds in steps:
        pace.observe([Span(0, tokens)], seconds)
        known = [pace.seconds(Span(0, size)) for size in (100, 1000, 10_000)]
        assert None not in known
        assert known == sorted(known, key=float)
        assert float(known[0] or 0) >= 0


def test_old_steps_fade() -> None:
    pace = PrefillPace()
    for _ in range(20):
        pace.observe([Span(0, 1000)], 1.0)
    for _ in range(40):
        pace.observe([Span(0, 1000)], 2.0)
    assert pace.seconds(Span(0, 1000)) == pytest.approx(2.0, rel=0.05)


def test_the_fastest_of_the_last_transfers_counts() -> None:
    pace = LinkPace()
    pace.observe(1000, 0.1)
    pace.observe(1000, 10.0)
    assert pace.seconds(10_000) == pytest.approx(1.0)
    for _ in range(8):
        pace.observe(1000, 10.0)
    assert pace.seconds(10_000) == pytest.approx(100.0)


@given(
    RATES,
    st.floats(0, 1e-6),
    st.lists(st.integers(64, 8192), min_size=16, max_size=16),
    st.dictionaries(st.integers(0, 15), st.floats(1e-6, 1e3), max_size=3),
)
def test_a_few_wrong_steps_decide_nothing(
    per_token: float, per_pair: float, sizes: list[int], wrong: dict[int, float]
) -> None:
    """Slowed down by something else, or seen to end together with the one before."""
    pace, start = PrefillPace(), 0
    for number, size in enumerate(sizes):
        span = Span(start, start + size)
        expected = per_token * span.tokens + per_pair * span.pairs
        pace.observe([span], wrong.get(number, expected))
        start += size
    far = Span(0, 4096)
    expected = per_token * far.tokens + per_pair * far.pairs
    assert pace.seconds(far) == pytest.approx(expected, rel=1e-6)


def test_steps_of_a_few_tokens_bound_the_pace_from_above() -> None:
    """Where all is loaded nothing else is computed: a slow first step must not count for ever."""
    pace = PrefillPace()
    pace.observe([Span(0, 100)], 10.0)
    for start in range(1000, 1040):
        pace.observe([Span(start, start + 10)], 0.02)
    assert pace.seconds(Span(0, 1000)) == pytest.approx(2.0)
    pace.observe([Span(0, 10)], 5.0)
    assert pace.seconds(Span(0, 1000)) == pytest.approx(2.0)


def test_a_rate_is_doubtful_after_many_refusals_or_a_long_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = LinkPace()
    pace.observe(1000, 1.0)
    for _ in range(16):
        assert not pace.doubtful
        pace.refuse()
    assert pace.doubtful
    pace.observe(1000, 1.0)
    assert not pace.doubtful
    now += 30.5
    assert pace.doubtful
    pace.give_up()
    assert (pace.doubtful, pace.patience) == (False, 2)
    now += 59.0
    assert not pace.doubtful
    now += 2.0
    assert pace.doubtful
    for _ in range(10):
        pace.give_up()
    assert pace.patience == 64
    pace.observe(1000, 1.0)
    assert pace.patience == 1
