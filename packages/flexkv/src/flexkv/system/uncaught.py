# SPDX-License-Identifier: Apache-2.0
"""Prints uncaught errors about bad input as one line.

An engine reads FlexKV's settings deep in its own calls. The traceback of a wrong one has about 80
lines, none of which help its user.
"""

from __future__ import annotations

import functools
import sys
from types import TracebackType


@functools.cache
def print_without_traceback(kind: type[BaseException]) -> None:
    """Make the interpreter print only the last line of the traceback of an uncaught exception of
    `kind`. Other exceptions go to the hook that was there before."""
    before = sys.excepthook

    def hook(found: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, kind):
            before(found, error, trace)
        elif sys.stderr is not None:
            print(f"{found.__module__}.{found.__qualname__}: {error}", file=sys.stderr)

    sys.excepthook = hook
