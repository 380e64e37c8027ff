# SPDX-License-Identifier: Apache-2.0
"""Hits save the time of computing, less that of loading."""

from __future__ import annotations

import pytest

from flexkv.plan.saving import LoadCost, PrefillCost, Savings

SIZE = 10
COST = PrefillCost(0.1, 0.01, "test")
"""Blocks of 10 tokens take 1.5 s, 2.5 s, 3.5 s and so on."""


def test_computing_grows_with_the_position() -> None:
    savings = Savings(COST, LoadCost(0.0, 0.0), SIZE, 8)
    assert savings.of_hit(0, 3, 0) == pytest.approx(1.5 + 2.5 + 3.5)
    assert savings.of_hit(2, 4, 0) == pytest.approx(3.5 + 4.5)
    assert savings.of_hit(0, 8, 0) == pytest.approx(COST.of_range(0, 80))


def test_loading_is_taken_off() -> None:
    savings = Savings(COST, LoadCost(0.5, 0.25), SIZE, 8)
    assert savings.of_hit(0, 3, 0) == pytest.approx(7.5 - 3 * 0.5)
    assert savings.of_hit(0, 3, 2) == pytest.approx(7.5 - 3 * 0.5 - 2 * 0.25)


def test_a_block_that_is_computed_faster_saves_nothing() -> None:
    savings = Savings(COST, LoadCost(2.0, 1.0), SIZE, 8)
    assert savings.of_hit(0, 3, 0) == pytest.approx(0.0 + 0.5 + 1.5)
    assert savings.of_hit(0, 3, 3) == pytest.approx(0.0 + 0.0 + 0.5)
