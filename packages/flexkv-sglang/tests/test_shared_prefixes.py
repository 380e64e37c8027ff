# SPDX-License-Identifier: Apache-2.0
"""Of requests with the same first missing page, one loads it and the others wait for that."""

from __future__ import annotations

import pytest

from flexkv_sglang.waiting import SharedPrefixes


def shared(**first: str) -> SharedPrefixes:
    """Waiting requests with these first missing pages. Host memory has pages of small letters."""
    made = SharedPrefixes(str.islower)
    for rid, page in first.items():
        made.waits(rid, page, None)
    return made


def held(prefixes: SharedPrefixes, rids: str, others: str = "") -> str:
    """Which of the waiting requests are held; `others` wait for another reason."""
    waits = prefixes.held([*rids], [rid in others for rid in rids])
    return "".join(rid for rid, each in zip(rids, waits, strict=True) if each)


def test_one_request_of_each_page_is_scheduled() -> None:
    assert held(shared(a="p", b="q", c="p", d="q", e="r", f="p"), "abcdef") == "cdf"


def test_pages_that_nobody_can_load_hold_no_request() -> None:
    assert held(shared(a="P", b="P"), "ab") == ""


def test_the_others_wait_until_the_load_has_ended() -> None:
    prefixes = shared(a="p", b="p", c="p")
    assert held(prefixes, "abc") == "bc"
    prefixes.loads("a", "p", 3)
    prefixes.scheduled("a")
    prefixes.end_loads(2)
    assert held(prefixes, "bc") == "bc"
    assert not prefixes.is_unsure("b")
    prefixes.end_loads(3)
    assert held(prefixes, "bc") == ""
    assert [prefixes.is_unsure(rid) for rid in "bcb"] == [True, True, False]
    # SGLang's own cache lacks the page still: the load has failed.
    prefixes.waits("b", "p", None)
    prefixes.waits("c", "p", None)
    assert held(prefixes, "bc") == "c"


def test_the_others_compute_what_the_first_computes() -> None:
    prefixes = shared(a="p", b="p", c="p")
    assert held(prefixes, "abc") == "bc"
    prefixes.scheduled("a")
    assert held(prefixes, "bc") == ""


@pytest.mark.parametrize("left", [True, False])
def test_the_next_one_loads_if_the_first_does_not(left: bool) -> None:
    prefixes = shared(a="p", b="p", c="p")
    prefixes.loads("a", "p", 3)
    assert held(prefixes, "abc") == "abc"
    prefixes.cancelled("a")
    assert held(prefixes, "bc" if left else "abc") == ("c" if left else "bc")


def test_a_request_that_waits_for_a_disk_leads_no_other() -> None:
    assert held(shared(a="p", b="p", c="p"), "abc", others="a") == "ac"


def test_a_request_of_another_priority_does_not_wait() -> None:
    prefixes = shared(a="p")
    prefixes.waits("b", "p", 1)
    assert held(prefixes, "ab") == ""


def test_nothing_is_held_after_a_reset() -> None:
    prefixes = shared(a="p", b="p")
    prefixes.loads("a", "p", 0)
    prefixes.clear()
    assert held(prefixes, "ab") == ""
