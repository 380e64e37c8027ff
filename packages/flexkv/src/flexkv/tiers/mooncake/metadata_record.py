# SPDX-License-Identifier: Apache-2.0
"""The record of the epoch at Mooncake's HTTP metadata server."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
import urllib.parse
from collections.abc import Sequence

from flexkv.tiers.mooncake.member import MooncakeError
from flexkv.types.deadline import call_within

HTTP = ("http://", "https://")
"""How the address of a metadata server begins that keeps the record."""

_SETTLE_SECONDS = 0.5
"""Wait after the creation of a record. The metadata server has no conditional writes: if several
nodes create a record at once, the last one wins, and all nodes that waited read it. A node that
writes even later shares blocks with no other. Not tuned."""

_ANSWER_BYTES = 4096
"""The most bytes of an epoch's record that are read; FlexKV's have 80."""


class MetadataRecord:
    """A `flexkv.tiers.epochs.EpochRecord` at Mooncake's metadata server.

    In the store itself the record would vanish with the nodes that hold it. The methods raise
    `OSError` if the server fails or does not answer in time.
    """

    def __init__(self, url: str, fingerprint: str, timeout_seconds: float) -> None:
        parts = urllib.parse.urlsplit(url)
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._secure else 80)
        key = urllib.parse.quote(f"flexkv/epochs/{fingerprint}", safe="")
        self._path = f"{parts.path}?key={key}"
        self._timeout_seconds = timeout_seconds

    def read(self) -> bytes | None:
        status, data = self._request("GET")
        if status == http.client.NOT_FOUND:
            return None
        return self._check(status, data)

    def create(self, record: bytes) -> None:
        if self.read() is None:
            self.replace(record)
            time.sleep(_SETTLE_SECONDS)

    def replace(self, record: bytes) -> None:
        self._check(*self._request("PUT", record))

    def _check(self, status: int, data: bytes) -> bytes:
        if status != http.client.OK:
            raise MooncakeError(f"Mooncake's metadata server answered with HTTP status {status}")
        return data

    def _request(self, method: str, body: bytes | None = None) -> tuple[int, bytes]:
        # http.client, since urllib would send it through the proxies of the environment.
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        made = kind(self._host, self._port, timeout=self._timeout_seconds)
        opened: list[socket.socket] = []
        given_up = threading.Event()

        def ask() -> tuple[int, bytes]:
            made.connect()
            opened.append(made.sock)
            if given_up.is_set():
                made.close()
                raise TimeoutError("the connection came too late")
            made.request(method, self._path, body)
            answer = made.getresponse()
            return answer.status, answer.read(_ANSWER_BYTES)

        try:
            # The timeout of a connection is for each of its pieces, and not for a name's address.
            ended = call_within({self._host: ask}, self._timeout_seconds)
            if not ended:
                given_up.set()
                _hang_up(opened)
                raise MooncakeError(
                    f"Mooncake's metadata server did not answer within {self._timeout_seconds:g} s"
                )
            return ended[self._host]
        except http.client.HTTPException as error:
            raise MooncakeError(
                f"Mooncake's metadata server answered with {type(error).__name__}"
            ) from None
        finally:
            made.close()


def _hang_up(opened: Sequence[socket.socket]) -> None:
    """End the thread that reads from a connection."""
    for each in opened:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
