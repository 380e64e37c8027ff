# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from flexkv.engine.releases import Age, Releases

RANGE = Releases("it", (0, 20), (0, 33))


@pytest.mark.parametrize(
    ("version", "age"),
    [
        ("0.19.9", Age.OLDER),
        ("0.9", Age.OLDER),
        ("0.0.0", Age.OLDER),
        ("dev", Age.OLDER),
        ("", Age.OLDER),
        # With one number only, it could be any.
        ("1", Age.OLDER),
        ("0.20", Age.TESTED),
        ("0.20.0rc1", Age.TESTED),
        ("0.33.9+cpu", Age.TESTED),
        ("0.34.0", Age.NEWER),
        ("1.0", Age.NEWER),
    ],
)
def test_a_version_is_placed_by_its_leading_numbers(version: str, age: Age) -> None:
    assert RANGE.age(version) is age


def test_without_a_newest_release_none_is_too_new() -> None:
    assert Releases("it", (0, 5, 20), None).age("99.0.0") is Age.TESTED


def test_a_range_reads_as_in_a_sentence() -> None:
    assert str(RANGE) == "0.20 to 0.33"
    assert str(Releases("it", (0, 5, 23), (0, 5, 23))) == "0.5.23"
    assert str(Releases("it", (0, 5, 20), None)) == "0.5.20 or newer"
