# SPDX-License-Identifier: Apache-2.0
"""A table of `flexkv top`, which a narrow terminal shows without columns."""

from __future__ import annotations

from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_INDENT = 2
_EMPTY = "-"
_WIDE = 1 << 12
"""Columns in which any table has room."""


class Rows:
    """Rows with named cells. Where there is no room for a column each, each row is a block of
    lines: its first cell, then each other cell behind its name. Nothing is cut off.

    Args:
        names: the names of the cells.
        justify: of all columns but the first.
    """

    def __init__(self, *names: str, justify: Literal["left", "right"] = "right") -> None:
        self._names = names
        self._justify = justify
        self._rows: list[list[Text]] = []

    def add(self, *cells: str | Text) -> None:
        """Add a row, with a cell for each name."""
        self._rows.append([Text(each) if isinstance(each, str) else each for each in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table()
        wanted = Measurement.get(console, options.update(width=_WIDE), table).maximum
        if wanted <= options.max_width:
            yield table
            return
        for row in self._rows:
            yield Text(row[0].plain, style="bold")
            yield Padding(self._lines(row), (0, 0, 0, _INDENT))

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column(self._names[0], no_wrap=True)
        for name in self._names[1:]:
            table.add_column(name, justify=self._justify, no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        return table

    def _lines(self, row: list[Text]) -> Text:
        return Text("\n").join(
            Text(f"{name} ").append_text(cell)
            for name, cell in zip(self._names[1:], row[1:], strict=True)
            if cell.plain != _EMPTY
        )
