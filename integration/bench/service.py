# SPDX-License-Identifier: Apache-2.0
"""The cache that all engines of a node share, beside a cache of the engine's own."""

from __future__ import annotations

from collections.abc import Callable

from integration.bench.rows import Row
from integration.bench.service_calls import call_rows
from integration.bench.service_ends import end_rows
from integration.bench.service_load import load_row
from integration.bench.service_ttft import ttft_rows
from integration.bench.setup import Bench


def service_rows(bench: Bench, say: Callable[[str], None]) -> list[Row]:
    """All rows of `flexkv serve`."""
    return [*call_rows(say), *end_rows(say), load_row(say), *ttft_rows(bench, say)]
