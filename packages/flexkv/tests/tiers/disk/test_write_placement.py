# SPDX-License-Identifier: Apache-2.0
"""Which directory gets the next block, where several have one policy."""

from __future__ import annotations

from pathlib import Path

from disk_blocks import Client, names, opened
from policy_checks import CheckedPolicy, UseOrderPolicy

from flexkv.eviction import POLICIES, RequestContext
from flexkv.tiers.job import Outcome

DONE = Outcome.DONE
OLD, NEW = names(8), names(8, first=100)


class InOrder(UseOrderPolicy):
    """Evicts the blocks of `OLD` first, in their order; then those used longest ago."""

    def victim(self) -> bytes | None:
        wanted = [key for key in OLD if key in self._evictable]
        return wanted[0] if wanted else super().victim()


def places(client: Client, keys: list[bytes]) -> list[int]:
    """For each block the number of its directory."""
    drives = client.tier.drives
    return [[key in each.index for each in drives].index(True) for key in keys]


def filled(client: Client) -> list[int]:
    """Write `OLD`, all of which begin a prefix. Returns the directory of each."""
    for key in OLD:
        assert client.write([key]) == [DONE]
    return places(client, OLD)


def test_the_directory_of_the_block_that_leaves_gets_the_next_one(tmp_path: Path) -> None:
    checked = CheckedPolicy(InOrder())
    with opened(tmp_path / "a", tmp_path / "b", slots=4, policy=lambda slots: checked) as client:
        before = filled(client)
        assert sorted(before) == [0] * 4 + [1] * 4
        assert client.write(NEW[:3]) == [DONE] * 3  # three victims, in one batch
        assert client.found(OLD) == OLD[3:]
        assert places(client, NEW[:3]) == before[:3]
        for new in NEW[3:]:
            assert client.write([new]) == [DONE]
        assert client.found(OLD) == []
        assert places(client, NEW) == before


def test_a_directory_without_room_keeps_its_blocks_and_the_others_go_on(tmp_path: Path) -> None:
    """The policy's victim is then in a directory that cannot write."""
    checked = CheckedPolicy(InOrder())
    with opened(tmp_path / "a", tmp_path / "b", slots=4, policy=lambda slots: checked) as client:
        before = filled(client)
        full, other = before[0], 1 - before[0]
        client.tier.drives[full].link.queue_bytes = 0
        assert client.write(NEW[:4]) == [DONE] * 4
        assert places(client, NEW[:4]) == [other] * 4
        assert client.found(OLD) == [key for key, at in zip(OLD, before, strict=True) if at == full]


def test_a_prefix_over_several_directories_leaves_from_its_end(tmp_path: Path) -> None:
    chain = names(8)
    with opened(tmp_path / "a", tmp_path / "b", slots=4, policy=POLICIES["hazard"]) as client:
        after = [None, *chain[:-1]]
        for i, key in enumerate(chain):
            ticket = client.tier.write([key], [client.buffers[0]], [after[i]])
            assert client.wait(ticket, 1) == [DONE]
        assert set(places(client, chain)) == {0, 1}
        for left in range(7, 0, -1):
            assert client.write([NEW[left]]) == [DONE]
            assert client.found(chain) == chain[:left]


def test_several_directories_learn_of_a_request_once(tmp_path: Path) -> None:
    made: list[int] = []
    checked = CheckedPolicy(UseOrderPolicy())

    def make(slots: int) -> CheckedPolicy:
        made.append(slots)
        return checked

    with opened(tmp_path / "a", tmp_path / "b", slots=4, policy=make) as client:
        context = RequestContext(request_id="one")
        client.tier.began(OLD, context, 1.0)
        client.tier.ended("one", 7, 2.0)
        assert made == [8]
        assert checked.prompts == [(OLD, context)]
        assert checked.answers == {"one": 7}


def test_blocks_of_before_a_restart_are_known_once(tmp_path: Path) -> None:
    """Both directories have four blocks that the other one has, too."""
    for root in ("a", "b"):
        with opened(tmp_path / root, slots=6) as client:
            client.write([*OLD[:4], *(NEW[:2] if root == "a" else NEW[2:4])])
    checked = CheckedPolicy(UseOrderPolicy())
    with opened(tmp_path / "a", tmp_path / "b", slots=6, policy=lambda slots: checked) as client:
        assert checked.evictable.keys() == {*OLD[:4], *NEW[:4]}
        assert client.found([*OLD[:4], *NEW[:4]]) == [*OLD[:4], *NEW[:4]]
        assert client.tier.figures.blocks == 8
        assert client.write(NEW[4:]) == [DONE] * 4
        assert client.tier.figures.evicted_blocks == 0, "the second copies left their slots"
