# SPDX-License-Identifier: Apache-2.0
"""Checks that no two pages share bytes: a copy of one would overwrite the other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from flexkv.layout.planes import Plane
from flexkv.types.errors import LayoutError


def check_disjoint(names: Mapping[Plane, str], num_blocks: int) -> None:
    """Refuse planes of one row each that share bytes.

    Planes whose address ranges do not meet are valid with any strides. Planes that do meet
    interleave block by block, so each must have its own place within a common stride.

    Args:
        names: the planes, and the name of each in errors.
        num_blocks: blocks that each plane has.

    Raises:
        LayoutError: two share bytes.
    """
    cluster: list[Plane] = []
    end = 0
    for plane in sorted(names):
        if cluster and plane.base >= end:
            _check_cluster(cluster, names, num_blocks)
            cluster = []
        cluster.append(plane)
        end = max(end, plane.base + (num_blocks - 1) * plane.block_stride + plane.row_bytes)
    _check_cluster(cluster, names, num_blocks)


def _check_cluster(cluster: list[Plane], names: Mapping[Plane, str], num_blocks: int) -> None:
    stride = cluster[0].block_stride if num_blocks > 1 else 1 << 62
    places = sorted(((plane.base - cluster[0].base) % stride, plane) for plane in cluster)
    places.append((stride + places[0][0], places[0][1]))
    for (start, plane), (limit, other) in itertools.pairwise(places):
        if start + plane.row_bytes > limit or plane.block_stride != other.block_stride:
            raise LayoutError(
                f"pages of KV cache tensors {names[plane]!r} and {names[other]!r} overlap or "
                f"interleave at different strides ({plane}, {other}); allowed: pages that "
                f"share no bytes"
            )
