# SPDX-License-Identifier: Apache-2.0
"""The end of all keys of an engine, which tells blocks of different weights apart."""

from __future__ import annotations

import secrets

_BYTES = 16


class KeyEpoch:
    """The time between two changes of an engine's weights. Single-threaded.

    Attributes:
        end: the end of all keys; empty as long as the weights are those of the model's files.
        flushes: how often SGLang has flushed its own cache.
        mixed: whether SGLang's own cache may have pages of earlier weights. Pages that are computed
            behind such pages have the keys of this epoch, and are of no use after a flush.
    """

    def __init__(self) -> None:
        self.end = b""
        self.flushes = 0
        self.mixed = False

    def flushed(self) -> bool:
        """Count a flush of SGLang's own cache. Returns whether `renew` must follow."""
        self.flushes += 1
        return self.mixed

    def renew(self, *, mixed: bool) -> None:
        """Begin another epoch, in which no earlier key is found, by no process. `mixed`: see the
        attribute."""
        self.end = secrets.token_bytes(_BYTES)
        self.mixed = mixed
