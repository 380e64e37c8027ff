# SPDX-License-Identifier: Apache-2.0
"""The errors of a device in the log: the first of each kind, and the one that opens a circuit."""

from __future__ import annotations

import logging
import re

logger = logging.getLogger(__name__)

_KINDS = 16
"""Most kinds of errors of a device that are logged. A store makes up the texts. Not tuned."""

_NAMES = re.compile(r"[0-9a-f]{8,}|\d+\.\d+")
"""Names of blocks and times, in which errors of one kind differ."""


class FailureLog:
    """Logs the first error of each kind. Single-threaded.

    Args:
        device: name of the device: a path or a tier.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._kinds: set[tuple[str, str]] = set()

    def note(self, what: str, error: str) -> None:
        """Note the end of a job.

        Args:
            what: the kind of job, such as "reads from".
            error: text of the job's first error; empty if it had none.
        """
        kind = what, _NAMES.sub("", error)
        if not error or kind in self._kinds or len(self._kinds) == _KINDS:
            return
        self._kinds.add(kind)
        logger.warning(
            "%s %s failed: %s; FlexKV skips these blocks and goes on (each error is logged once)",
            what,
            self._device,
            error,
        )


def describe_end(error: str, seconds: float) -> str:
    """How a job ended that opened a circuit.

    Args:
        error: text of the job's first error; empty if it had none.
        seconds: how long the job ran.
    """
    return error or f"no error, but {seconds:.3g} s"
