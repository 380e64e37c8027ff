# SPDX-License-Identifier: Apache-2.0
"""Servers of shared stores start again where they were, whatever other processes do meanwhile."""

from __future__ import annotations

import errno
import socket

import pytest

pytest.importorskip("moto", reason="moto is not installed: pip install moto flask flask-cors")

from integration.harness.s3_server import S3Server


def test_nobody_is_given_the_port_of_a_server_that_is_down() -> None:
    with S3Server() as server:
        server.kill()
        with socket.socket() as other, pytest.raises(OSError) as caught:  # noqa: PT011
            other.bind(("127.0.0.1", server.port))
        assert caught.value.errno == errno.EADDRINUSE
        server.restart()
        assert server.objects("cache/") == 0
