# SPDX-License-Identifier: Apache-2.0
"""Lets a command that gets SIGTERM, or whose terminal is closed, end as after Ctrl-C: with what it
has started, and with its folders.

Standard library only: the noxfile imports this before any package is installed.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType


def interrupt_at_sigterm(*, forward: bool = False) -> None:
    """Raise KeyboardInterrupt in the main thread at the first SIGTERM or SIGHUP of this process.
    Later ones are ignored, since things are being ended then.

    Args:
        forward: whether its children, which end themselves, get the signal, too.
    """
    own = os.getpid()

    def interrupt(number: int, _: FrameType | None) -> None:
        if os.getpid() != own:  # a fork of it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        for each in numbers:
            signal.signal(each, lambda *_: None)
        if forward:
            for child in Path(f"/proc/self/task/{own}/children").read_text().split():
                os.kill(int(child), number)
        raise KeyboardInterrupt

    # nohup ignores SIGHUP for good.
    numbers = [
        each
        for each in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(each) is not signal.SIG_IGN
    ]
    for each in numbers:
        signal.signal(each, interrupt)
