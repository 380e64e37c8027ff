# SPDX-License-Identifier: Apache-2.0
"""The epoch of an engine's keys: blocks of different weights have different keys."""

from __future__ import annotations

import hashlib
import secrets

_MARK = b"\xfeFKE"
_BYTES = 16


class KeyEpoch:
    """The time between two changes of an engine's weights.

    All keys of an epoch end with `end`. The first epoch, that of the model's files, has no end: its
    blocks serve other engines and later processes. The end of a later epoch is random, of 16 bytes.
    So no other engine and no later process finds the blocks of a later epoch, and nothing has to be
    cleared.

    If each of an engine's processes begins the same epochs by itself, `engine` tells them from all
    others; it is empty if one process makes all keys.
    """

    def __init__(self, engine: bytes = b"") -> None:
        self.end = b""
        self._engine = engine
        self._number = 0

    def renew(self) -> None:
        """Begin another epoch, in which no earlier key is found, by no process. If the engine was
        named, the epoch of this number is the same in all of its processes."""
        self._number += 1
        drawn = secrets.token_bytes(_BYTES - len(_MARK))
        if self._engine:
            text = b"%d %s" % (self._number, self._engine)
            drawn = hashlib.blake2b(text, digest_size=len(drawn)).digest()
        self.end = _MARK + drawn

    def has(self, key: bytes) -> bool:
        """Whether a key is one of this epoch.

        In the first epoch the answer is wrong for one key of four billion, which ends like those of
        a later epoch by chance.
        """
        return key.endswith(self.end) if self.end else key[-_BYTES : len(_MARK) - _BYTES] != _MARK
