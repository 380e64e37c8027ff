# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from flexkv.layout import PlacedPlane, share_of


@st.composite
def placed_planes(draw: st.DrawFn) -> list[PlacedPlane]:
    planes = []
    base, offset = 4096, 0
    for _ in range(draw(st.integers(1, 5))):
        rows, row_bytes = draw(st.integers(1, 5)), draw(st.integers(1, 300))
        row_stride = row_bytes + (draw(st.integers(0, 50)) if rows > 1 else 0)
        planes.append(PlacedPlane(base, 100_000, rows, row_stride, row_bytes, offset))
        base += rows * row_stride + draw(st.integers(0, 9))
        offset += rows * row_bytes
    return planes


def bytes_of(planes: list[PlacedPlane]) -> list[tuple[int, int]]:
    """Address among the pages and place in the slot of every byte, in order."""
    return [
        (plane.base + row * plane.row_stride + i, plane.slot_offset + row * plane.row_bytes + i)
        for plane in planes
        for row in range(plane.rows)
        for i in range(plane.row_bytes)
    ]


@given(placed_planes(), st.integers(1, 6))
def test_replicas_together_store_each_byte_once_and_load_all(
    planes: list[PlacedPlane], replicas: int
) -> None:
    stored = []
    for replica in range(replicas):
        cut, share = share_of(planes, replica, replicas)
        assert bytes_of(cut) == bytes_of(planes)
        assert all(plane.rows and plane.row_bytes for plane in cut)
        stored.append(bytes_of(cut[share.start : share.stop]))
    assert list(itertools.chain(*stored)) == bytes_of(planes)


def test_large_planes_are_shared_evenly() -> None:
    page = PlacedPlane(4096, 1 << 20, 1, 1 << 20, 1 << 20, 0)
    for planes in ([page], [page._replace(rows=1 << 10, row_bytes=1 << 10, row_stride=1 << 11)]):
        sizes = []
        for replica in range(8):
            cut, share = share_of(planes, replica, 8)
            sizes.append(sum(plane.page_bytes for plane in cut[share.start : share.stop]))
        assert sizes == [1 << 17] * 8


def test_a_page_is_cut_between_cache_lines() -> None:
    page = PlacedPlane(4096, 1 << 20, 1, 1000, 1000, 0)
    for replica in range(3):
        cut, _ = share_of([page], replica, 3)
        assert all(plane.slot_offset % 64 == 0 for plane in cut)


def test_a_rank_alone_stores_all() -> None:
    planes = [PlacedPlane(4096, 128, 1, 64, 64, 0), PlacedPlane(8192, 128, 1, 64, 64, 64)]
    assert share_of(planes, 0, 1) == (planes, range(2))
