# SPDX-License-Identifier: Apache-2.0
"""The scheduler's line to the service: messages that wait to be sent, and those that have come."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque

from flexkv.service import messages as wire
from flexkv.service.page import PUBLISHED, READ, SENT

MOST_WAITING = 1000
"""Messages that wait to be sent, each of up to 50 KB. Beyond it only those are kept that slots
depend on, and of these there are no more than granted slots and fetches."""

_SILENT_SECONDS = 1.0
"""A service that owes an answer for so long counts as one that hangs."""

_STATE = (wire.Claim, wire.Publish, wire.Retract, wire.Return, wire.EndFetch, wire.Watch)


class Line:
    """The line. Single-threaded; nothing waits, and nothing raises. It owns the connection, on
    which calls do not wait; the bell (see `EnginePage`) is borrowed until `close`.

    Attributes:
        is_cut: whether the service has ended or closed the connection.
        reason: why it is cut, for the log.
        come: messages that `listen` has read; the caller removes each once it has handled it.
    """

    def __init__(self, connection: socket.socket, bell: memoryview) -> None:
        self.is_cut = False
        self.reason = ""
        self.come: deque[wire.ToEngine] = deque()
        self._connection = connection
        self._bell = bell
        self._heard = 0
        self._asked_at: float | None = None
        self._messages: deque[wire.ToService] = deque()
        self._packets: deque[bytes] = deque()
        self._room = bytearray(wire.MAX_PACKET)

    @property
    def has_news(self) -> bool:
        """Whether anything has come. Makes no system call."""
        return bool(self.come) or (not self.is_cut and self._bell[SENT] != self._bell[READ])

    @property
    def is_silent(self) -> bool:
        """Whether the service has owed an answer for too long."""
        asked = self._asked_at
        return asked is not None and time.monotonic() - asked > _SILENT_SECONDS

    def await_answer(self) -> None:
        """The service owes an answer from now on, if it did not before."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()

    def note_answer(self) -> None:
        """The service has answered, by a message or in shared memory."""
        self._asked_at = None

    @property
    def published(self) -> int:
        """The number of stores that the service has published, modulo 2^32. Makes no system
        call."""
        return self._bell[PUBLISHED]

    @property
    def busy(self) -> bool:
        """Whether anything waits to be sent. Makes no system call."""
        return bool(self._messages or self._packets)

    def put(self, *messages: wire.ToService) -> bool:
        """Send messages of one kind with the next `send`, all or none. Returns whether that may
        succeed."""
        fits = len(self._messages) < MOST_WAITING or isinstance(messages[0], _STATE)
        if self.is_cut or not fits:
            return False
        self._messages.extend(messages)
        return True

    def listen(self) -> None:
        """Read what has come."""
        if self.is_cut or self._bell[SENT] == self._bell[READ]:
            return
        try:
            while self._heard != self._bell[SENT]:
                packet = wire.receive(self._connection, self._room)
                if not packet:
                    self.cut("it has ended or closed the connection")
                    return
                self._heard = (self._heard + 1) % (1 << 32)
                self.come += wire.read_engine(packet)
                self.note_answer()
        except BlockingIOError:
            self._heard = self._bell[SENT]
        except Exception as error:  # noqa: BLE001 - a packet may be lost: both sides begin anew
            self.cut(str(error))
            return
        self._bell[READ] = self._heard

    def send(self) -> None:
        """Send what waits, as far as the service reads."""
        try:
            while self._packets or self._messages:
                if not self._packets:
                    self._packets += wire.packets(list(self._messages))
                    self._messages.clear()
                self._connection.send(self._packets[0])
                self._packets.popleft()
        except BlockingIOError:
            pass
        except Exception as error:  # noqa: BLE001 - a packet may be lost, or sent twice
            self.cut(str(error))

    def resume(self, connection: socket.socket) -> None:
        """Go on with another connection, whose service has set the bell to zero. What waited for
        the last one is gone."""
        self._connection = connection
        self._heard = self._bell[READ] = 0
        self._asked_at = None
        self.is_cut, self.reason = False, ""

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.cut("closed")
        self._bell.release()

    def cut(self, reason: str) -> None:
        """Close the connection, for whoever has it, until `resume`. Idempotent."""
        self.is_cut, self.reason = True, self.reason or reason
        self._messages.clear()
        self._packets.clear()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
