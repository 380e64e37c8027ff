# SPDX-License-Identifier: Apache-2.0
"""The layout of SGLang's pool of recurrent states: Mamba, gated delta nets, short convolutions.

A state belongs to the end of a prefix. It is as large as many pages of full attention, so its rows
are cut into parts that take a slot each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from flexkv.layout import KVLayout, TensorView
from flexkv.types.errors import LayoutError

_POOL = "MambaPool"
"""SGLang's class of the pool whose rows are whole states, as its prefix cache keeps them."""
_UNITS = (256, 16, 1)
"""Rows are cut at multiples of the first of these that divides them, in bytes: short pieces cost a
GPU as much as long ones."""
_MOST_PARTS = 4096
"""Parts of a row at most. A slot is then larger than a page of full attention."""


class CutStates(NamedTuple):
    """One kind of tensors of a state, of all layers.

    Attributes:
        layout: of the parts: those of the first state, then those of the next.
        parts: of a state.
        tensors: SGLang's by name, as bytes, dimension 0 counting parts; SGLang keeps them alive.
        trait: what else the meaning of the bytes depends on.
    """

    layout: KVLayout
    parts: int
    tensors: Mapping[str, torch.Tensor]
    trait: str


def describe_states(pool: Any, first_layer: int, most: int) -> list[CutStates]:
    """Describe the pool of states of one rank. `most`: bytes of a part over all layers, if rows can
    be cut so short. Raises LayoutError if FlexKV cannot cache the pool."""
    kind = type(pool).__name__
    infos = list(pool.get_device_pool_infos()) if kind == _POOL else []
    if len(infos) != 1:
        raise LayoutError(
            f"the pool {kind} keeps recurrent states in its own way; allowed: {_POOL}"
        )
    info = infos[0].buffer_info
    if len(info.extra_checkpoint_buffers):
        raise LayoutError(f"the pool {kind} has side states beside its states; allowed: none")
    layers = [layer - first_layer for layer in infos[0].layer_ids]
    kinds = {"temporal": info.temporal}
    kinds |= {f"conv {number}": tensor for number, tensor in enumerate(info.conv)}
    return [_cut(name, each, layers, most) for name, each in kinds.items() if each.numel()]


def _cut(name: str, states: torch.Tensor, layers: list[int], most: int) -> CutStates:
    """Cut the rows of `states`, shape (layers, states, ...)."""
    rows = dict(zip(layers, _rows(name, states), strict=True))
    count, size = states.shape[1], next(iter(rows.values())).shape[1]
    parts = _parts_of(size, most // len(layers))
    tensors = {f"state {layer} {name}": row.view(count * parts, -1) for layer, row in rows.items()}
    views = [
        TensorView(str(layer), row.data_ptr(), (count * parts,), (1,), size // parts, page_dim=0)
        for layer, row in rows.items()
    ]
    order = sorted(range(2, states.dim()), key=states.stride)
    trait = f"state: {name} {tuple(states.shape[2:])} {states.dtype} in the order {order}"
    return CutStates(KVLayout.from_tensors(views, count * parts), parts, tensors, trait)


def _rows(name: str, states: torch.Tensor) -> Iterator[torch.Tensor]:
    """The states of each layer as bytes, shape (states, bytes)."""
    count, elements = states.shape[1], math.prod(states.shape[2:])
    run = 1
    for dim in sorted(range(1, states.dim()), key=lambda dim: (states.stride(dim), -dim)):
        if states.shape[dim] > 1 and states.stride(dim) != run:
            raise LayoutError(
                f"the states {name!r} have shape {tuple(states.shape)} and strides "
                f"{states.stride()}; allowed: states without gaps, one after another"
            )
        run *= states.shape[dim]
    for layer in states:
        flat = torch.as_strided(layer, (count, elements), (elements, 1))
        yield flat.view(torch.uint8)


def _parts_of(size: int, most: int) -> int:
    """Into how many equal parts to cut a row of `size` bytes, so that none is larger than `most`
    bytes if possible."""
    pieces = size // next(unit for unit in _UNITS if size % unit == 0)
    few = [each for each in range(1, min(pieces, _MOST_PARTS) + 1) if pieces % each == 0]
    return next((each for each in few if size <= each * most), few[-1])
