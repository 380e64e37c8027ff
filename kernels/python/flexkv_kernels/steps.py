# SPDX-License-Identifier: Apache-2.0
"""What an engine's steps do to its blocks: `steps.pyi` describes it."""

from __future__ import annotations

from flexkv_kernels._library import LIBRARY

NativeAccessLog = LIBRARY.brief.fkv_block_uses_type()
NativeFullBlocks = LIBRARY.brief.fkv_fill_calendar_type()
extend_tables = LIBRARY.brief.fkv_extend_tables()
