# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest
from no_files import no_more_files

from flexkv.service import messages as wire


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with pair[0], pair[1]:
        yield pair


def test_descriptors_without_room_for_files_are_no_large_packet(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    socket.send_fds(ends[0], [b"greeting"], [ends[0].fileno()])
    with no_more_files(), pytest.raises(OSError, match="Too many open files") as raised:
        wire.receive_greeting(ends[1])
    assert raised.value.errno == errno.EMFILE


@pytest.mark.parametrize(("size", "count"), [(1, 5), (wire.MAX_PACKET + 1, 1)])
def test_a_packet_of_too_much_is_refused(
    ends: tuple[socket.socket, socket.socket], size: int, count: int
) -> None:
    socket.send_fds(ends[0], [b"x" * size], [ends[0].fileno()] * count)
    with pytest.raises(wire.WireError, match="more than 65536 bytes or 4 descriptors"):
        wire.receive_greeting(ends[1])
