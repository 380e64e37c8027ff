# SPDX-License-Identifier: Apache-2.0
"""Finds the requests of a step whose blocks it fills, without a look at the others.

The code is among the kernels, because an engine's step waits for it; `flexkv_kernels/steps.pyi`
describes its calls. The kernels look for the name here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexkv.engine.scheduler.groups import Groups, Reach
from flexkv.engine.scheduler.request import TrackedRequest
from flexkv.system.native import kernels

if TYPE_CHECKING:
    from flexkv_kernels.steps import FullBlocks
else:
    FullBlocks = object

__all__ = ["Filled", "FullBlocks", "full_blocks"]

Filled = tuple[TrackedRequest, int, int]
"""A request whose blocks between two numbers of tokens are full."""


def full_blocks(groups: Groups) -> FullBlocks:
    """A calendar of requests to a model with these groups. The engine offers recurrent states when
    they are complete, so their blocks are not looked at. Raises ConfigError if the kernels are not
    installed."""
    tokens = [0 if g.reach is Reach.STATE else g.engine_block_tokens for g in groups.members]
    calendar: FullBlocks = kernels("steps").NativeFullBlocks(tokens, groups.alignment)
    return calendar
