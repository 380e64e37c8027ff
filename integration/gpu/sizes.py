# SPDX-License-Identifier: Apache-2.0
"""How much is copied and computed, and how often."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of everything that is measured.

    Attributes:
        blocks: blocks of 2 MiB on each side, at least 8. No more than 1 GiB: the piece in which
            arenas are registered, as one large copy must not cross the border of two.
        repeats: measurements of everything.
        swept_blocks: blocks of each copy of the sweep.
        swept_repeats: measurements of each of its rows.
        matrix: rows and columns of the matrices.
        attention_tokens: of the prompt whose attention is computed.
        products: matrix products, or computations of attention, in one measurement.
        submits: calls of submit that are timed.
    """

    blocks: int
    repeats: int
    swept_blocks: int
    swept_repeats: int
    matrix: int
    attention_tokens: int
    products: int
    submits: int


FULL = Sizes(
    blocks=480,
    repeats=9,
    swept_blocks=128,
    swept_repeats=3,
    matrix=8192,
    attention_tokens=8192,
    products=40,
    submits=51,
)
"""960 MiB is far more than any cache holds, so that no copy is served from one, and takes some
20 ms, against which what it takes to start and to notice the end is nothing. 40 products take some
60 ms on an H200, during which several GB are copied; so does attention. A copy of the sweep takes
some 5 ms."""

QUICK = Sizes(
    blocks=160,
    repeats=3,
    swept_blocks=32,
    swept_repeats=1,
    matrix=8192,
    attention_tokens=8192,
    products=40,
    submits=51,
)
