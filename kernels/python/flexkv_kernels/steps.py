# SPDX-License-Identifier: Apache-2.0
"""What an engine's steps do to its blocks, as `flexkv.engine` describes it.

`kernels/src/steps` has the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flexkv.engine.scheduler.access_log import AccessLog
from flexkv.engine.scheduler.full_blocks import FullBlocks
from flexkv.engine.scheduler.tables import ExtendTables
from flexkv_kernels._library import LIBRARY


class _MakeBlockUses(Protocol):
    def __call__(self) -> AccessLog:
        """Make an object that knows no request."""
        ...


class _MakeFillCalendar(Protocol):
    def __call__(self, group_tokens: Sequence[int], alignment: int, /) -> FullBlocks:
        """Make a calendar that watches no request.

        Args:
            group_tokens: tokens of an engine block of each cached group; 0 for a group of states.
            alignment: see `Groups`.

        Raises:
            ValueError: the alignment is not allowed.
        """
        ...


NativeAccessLog: _MakeBlockUses = LIBRARY.brief.fkv_block_uses_type()
NativeFullBlocks: _MakeFillCalendar = LIBRARY.brief.fkv_fill_calendar_type()
extend_tables: ExtendTables = LIBRARY.brief.fkv_extend_tables()
