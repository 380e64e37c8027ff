# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that tests start, stop and start again."""

from __future__ import annotations

import socket


def hold_port() -> socket.socket:
    """A socket bound to a free port of 127.0.0.1, which does not listen. While it is open, no other
    process is given the port. A server that sets SO_REUSEADDR can listen there all the same."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
