# SPDX-License-Identifier: Apache-2.0
"""What a section found, and what it says meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from integration.bench.rows import Row

T = TypeVar("T")


@dataclass(slots=True)
class Outcome:
    """Of one section.

    Attributes:
        name: of the section.
        rows: what was measured.
        notes: what else is to be said, say why something was not measured.
        failure: why the section did not come to its end; None if it did.
    """

    name: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None and all(row.passed for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """For the report. What was not measured has the value None: JSON knows no NaN."""
        rows = [row.as_json() for row in self.rows]
        for row in rows:
            row["value"] = None if math.isnan(row["value"]) else row["value"]
        return asdict(self) | {"rows": rows}


class Log:
    """What a section tells meanwhile, on the terminal and in its report, and how far it is.

    Args:
        finished: units that an earlier run of the section has finished.
        told: is given each note.
        unit_done: is given each unit whose rows are all there.
        kept: what an earlier run of the section has kept, by name.
        keep: is given the name and the value of what is to be kept, as JSON has it.
    """

    def __init__(
        self,
        finished: Set[str] = frozenset(),
        told: Callable[[str], None] = lambda _: None,
        unit_done: Callable[[str], None] = lambda _: None,
        *,
        kept: Mapping[str, Any] | None = None,
        keep: Callable[[str, Any], None] = lambda _, __: None,
    ) -> None:
        self.notes: list[str] = []
        self.kept = kept or {}
        self.keep = keep
        self._finished = finished
        self._told = told
        self._unit_done = unit_done

    def say(self, text: str) -> None:
        """How far it is."""
        print(f"  {text}", flush=True)

    def note(self, text: str) -> None:
        """What a reader of the report must know."""
        self.say(text)
        self.notes.append(text)
        self._told(text)

    def units(self, items: Iterable[T], name: Callable[[T], str]) -> Iterator[T]:
        """The items that no earlier run has finished. One is finished when the next is asked for:
        its rows must have been given out before."""
        for item in items:
            unit = name(item)
            if unit in self._finished:
                continue
            self.say(unit)
            yield item
            self._unit_done(unit)
