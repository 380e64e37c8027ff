# SPDX-License-Identifier: Apache-2.0
"""The boundary to the engine: where an unexpected exception ends instead of ending the engine."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable
from types import FunctionType, TracebackType
from typing import Any, Protocol, TypeVar, cast

logger = logging.getLogger(__name__)

LASTING = 16
"""Errors at one place that count as lasting if no success comes between. An error of one request or
a short lack of memory ends sooner; an engine makes as many steps in less than a second."""


class ErrorBoundary:
    """Counts errors by place, and logs each place once.

    Put `with boundary.guard(place, consequence):` around a call, and return the answer that makes
    it a miss behind the block.

    What is tried again after an error must not be tried for ever while the engine waits for it:
    give it up once `lasts(place)`, and say so by `gave_up`.

    Attributes:
        guard: makes a `Guard`, and the same one for the same arguments. A step enters many: a cache
            makes no call of Python.
        given_up: places at which errors lasted, and whose work has been given up.
        after_error: called after each error that may have lost something; must not raise.
        turn: held during each call of the engine, and between two of them by operators' calls.
    """

    __slots__ = ("_in_a_row", "after_error", "failures", "given_up", "guard", "turn")

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self.given_up: dict[str, None] = {}
        self.after_error: Callable[[], None] | None = None
        self.turn = threading.RLock()
        self._in_a_row: Counter[str] = Counter()
        self.guard: MakeGuard = functools.cache(functools.partial(Guard, self))

    def failed(
        self, place: str, consequence: str, error: BaseException, *, loses: bool = True
    ) -> None:
        """Record one failure."""
        self.failures[place] += 1
        self._in_a_row[place] += 1
        if loses and self.after_error is not None:
            self.after_error()
        if self.failures[place] == 1:
            logger.error(
                "error in %s: %s (logged once, then only counted)",
                place,
                consequence,
                exc_info=error,
            )

    def lasts(self, place: str) -> bool:
        """Whether the last `LASTING` guarded blocks of this place have all failed."""
        return self._in_a_row[place] >= LASTING

    def gave_up(self, place: str, consequence: str) -> None:
        """Record, once, that the work at a place was given up."""
        if place not in self.given_up:
            self.given_up[place] = None
            logger.error(
                "%d consecutive errors in %s: %s until the engine is restarted; the first error is "
                "further up in this log, please report it",
                LASTING,
                place,
                consequence,
            )


class MakeGuard(Protocol):
    """`Guard` of one boundary."""

    def __call__(self, place: str, consequence: str, *, loses: bool = True) -> Guard: ...


class Guard:
    """Swallows, counts and logs what its block raises. `KeyboardInterrupt` and the like pass. It
    has no state of its own, so that a block may be entered again within itself. If an error `loses`
    a lease or a copy perhaps, `after_error` is called."""

    __slots__ = ("_boundary", "_consequence", "_in_a_row", "_loses", "_place")

    __enter__ = staticmethod(bool)  # nothing to do, and no call of Python

    def __init__(
        self, boundary: ErrorBoundary, place: str, consequence: str, *, loses: bool = True
    ) -> None:
        self._boundary = boundary
        self._in_a_row = boundary._in_a_row
        self._place = place
        self._consequence = consequence
        self._loses = loses

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            if self._in_a_row:
                self._in_a_row.pop(self._place, None)
            return False
        if not isinstance(error, Exception):
            return False
        self._boundary.failed(self._place, self._consequence, error, loses=self._loses)
        return True


_Method = TypeVar("_Method", bound=Callable[..., Any])
_R = TypeVar("_R")


def answers(answer: Callable[..., object], consequence: str) -> Callable[[_Method], _Method]:
    """Decorate a method that an engine calls, so that it always answers. After an error `answer`
    does, called with the same arguments; it must not call what may raise.

    The method guards its parts, and what follows an error in one of them is done behind that guard.
    Errors reach this guard if that fails too, or if a part has no guard.
    """

    def decorate(method: _Method) -> _Method:
        place = f"the call {method.__name__.strip('_')}"

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._boundary.turn:
                try:
                    return method(self, *args, **kwargs)
                except Exception as error:  # noqa: BLE001 - the boundary to the engine
                    self._boundary.failed(place, consequence, error)
                    return answer(self, *args, **kwargs)

        return cast(_Method, call)

    return decorate


_Side = TypeVar("_Side", bound=type)


def in_turns(side: _Side) -> _Side:
    """Decorate a class with an attribute `boundary`: each of its public methods holds
    `ErrorBoundary.turn`. Its properties only read."""
    for name, method in list(vars(side).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(side, name, _in_turn(method))
    return side


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.boundary.turn:
            return method(self, *args, **kwargs)

    return call


def always(value: _R) -> Callable[..., _R]:
    """An answer that is the same for all arguments. `value` is immutable."""
    return lambda *_, **__: value
