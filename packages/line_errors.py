# SPDX-License-Identifier: Apache-2.0
"""Errors before the lines of FlexKV's code, for tests of what an error leaves behind."""

from __future__ import annotations

import ast
import functools
import itertools
import os
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

Line: TypeAlias = tuple[str, int]
"""A file and a number."""

SHARE = 1 if os.environ.pop("FLEXKV_EVERY_LINE", "") else 4
"""One of so many lines fails, chosen by file and number; each does if the variable is set, as in
`nox -s nightly`. FlexKV refuses variables that begin like its settings, so this one is removed."""


class InjectedError(Exception):
    """Nobody expects it."""


class LineErrors:
    """Raises an `InjectedError` before each line of some code that the arming thread executes, each
    once.

    Python ends tracing with an error that the tracing raised: `arm` allows one error.

    Args:
        code: folders and files.
        spared: whether no error is raised at a line of this file in this function.
        may_fail: whether an error may be raised at a line of this file now.
        spares_now: whether a line that has not failed yet is passed once more. Else each fails when
            it is first executed, where much of what it may lose is still empty.
        every_line: whether each line fails, and not one of `SHARE`.

    Attributes:
        hit: the lines before which an error was raised, in this order.
    """

    def __init__(
        self,
        code: Iterable[Path],
        spared: Callable[[str, str], bool] = lambda *_: False,
        may_fail: Callable[[str], bool] = lambda _: True,
        spares_now: Callable[[], bool] = lambda: False,
        *,
        every_line: bool = SHARE == 1,
    ) -> None:
        self._code = tuple(map(str, code))
        self._spared = spared
        self._may_fail = may_fail
        self._spares_now = spares_now
        self._every_line = every_line
        self._traced: dict[Any, bool] = {}
        self._done: set[Line] = set()
        self.hit: list[Line] = []

    def arm(self) -> None:
        """Let the next line fail that has not failed yet."""
        sys.settrace(self._enter)

    def spare(self, lines: Iterable[Line]) -> None:
        """Raise no error before these lines."""
        self._done.update(lines)

    def disarm(self) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        code = frame.f_code
        traced = self._traced.get(code)
        if traced is None:
            file = code.co_filename
            traced = file.startswith(self._code) and not self._spared(file, code.co_name)
            self._traced[code] = traced
        return self._at if traced else None

    def _at(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            may_fail = line not in self._done and self._may_fail(line[0])
            if may_fail and line[1] not in _headers(line[0]):
                if not (self._every_line or _is_chosen(line)):
                    self._done.add(line)
                elif not self._spares_now():
                    self._done.add(line)
                    self.hit.append(line)
                    raise InjectedError(f"{line[0]}:{line[1]}")
        return self._at


@functools.cache
def _headers(file: str) -> frozenset[int]:
    """The lines of a file with the heads of `with` statements. Python passes them again at the end,
    where an error would hit the exit of the context and not its body."""
    nodes = ast.walk(ast.parse(Path(file).read_text()))
    heads = (range(n.lineno, n.body[0].lineno) for n in nodes if isinstance(n, ast.With))
    return frozenset(itertools.chain.from_iterable(heads))


def _is_chosen(line: Line) -> bool:
    return zlib.crc32(f"{Path(line[0]).name}:{line[1]}".encode()) % SHARE == 0
