# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that tests start, stop and start again."""

from __future__ import annotations

import contextlib
import errno
import random
import socket


def hold_port(ports: range = range(1)) -> socket.socket:
    """A socket bound to a free port of 127.0.0.1, which does not listen. While it is open, no other
    process is given the port. A server that sets SO_REUSEADDR can listen there all the same.

    Args:
        ports: which ones are allowed; port 0 stands for any.

    Raises:
        OSError: all of them are in use.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for port in random.sample(ports, len(ports)):
        with contextlib.suppress(OSError):
            held.bind(("127.0.0.1", port))
            return held
    held.close()
    raise OSError(errno.EADDRINUSE, f"ports {ports.start} to {ports.stop - 1} are in use")
