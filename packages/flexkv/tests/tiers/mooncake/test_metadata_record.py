# SPDX-License-Identifier: Apache-2.0
"""The record of the epoch at a metadata server: behind TLS, and one that answers too late."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from certificates import Certificates

from flexkv.tiers.mooncake.metadata_record import MetadataRecord
from packages.conftest import PATIENCE_SECONDS

FINGERPRINT = "f" * 32


class Metadata(BaseHTTPRequestHandler):
    """Keeps values as Mooncake's metadata server does."""

    values: dict[str, bytes]

    def do_GET(self) -> None:
        self._answer(self.values.get(self._key))

    def do_PUT(self) -> None:
        self.values[self._key] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(b"")

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""

    @property
    def _key(self) -> str:
        return urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)["key"][0]

    def _answer(self, value: bytes | None) -> None:
        self.send_response(404 if value is None else 200)
        self.send_header("Content-Length", str(len(value or b"")))
        self.end_headers()
        self.wfile.write(value or b"")


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates.write(tmp_path)


@pytest.fixture
def url(certificates: Certificates) -> Iterator[str]:
    handler = type("Fresh", (Metadata,), {"values": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = certificates.context().wrap_socket(server.socket, server_side=True)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"https://127.0.0.1:{server.server_port}/metadata"
        server.shutdown()
        serving.join()


def test_a_record_behind_tls(
    url: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.authority))
    record = MetadataRecord(url, FINGERPRINT, PATIENCE_SECONDS)
    assert record.read() is None
    record.create(b"one")
    record.create(b"two")
    assert record.read() == b"one"
    record.replace(b"three")
    assert record.read() == b"three"


def test_a_server_with_an_unknown_certificate_is_not_used(url: str) -> None:
    record = MetadataRecord(url, FINGERPRINT, PATIENCE_SECONDS)
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        record.read()


def test_a_metadata_server_that_drips_is_given_up_and_left_alone() -> None:
    """Each byte comes in time, and the answer never ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        hung_up = threading.Event()

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(ConnectionError):
                while True:
                    connection.sendall(b"H")
                    time.sleep(0.01)
            hung_up.set()

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/metadata"
        with pytest.raises(OSError, match=r"metadata server did not answer within 0\.5 s"):
            MetadataRecord(url, FINGERPRINT, 0.5).read()
        assert hung_up.wait(PATIENCE_SECONDS)
        thread.join()


def test_a_connection_that_comes_after_the_deadline_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a name server that answers late."""
    given_up = threading.Event()
    connect = http.client.HTTPConnection.connect

    def connect_late(connection: http.client.HTTPConnection) -> None:
        given_up.wait(PATIENCE_SECONDS)
        connect(connection)

    monkeypatch.setattr(http.client.HTTPConnection, "connect", connect_late)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_SECONDS)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/metadata"
        with pytest.raises(OSError, match=r"metadata server did not answer within 0\.2 s"):
            MetadataRecord(url, FINGERPRINT, 0.2).read()
        given_up.set()
        connection, _ = server.accept()
        with connection:
            connection.settimeout(PATIENCE_SECONDS)
            assert connection.recv(1) == b""
