# SPDX-License-Identifier: Apache-2.0
"""A small S3 server that answers as the test says."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from certificates import Certificates

URL = "s3://bucket/path"
SECRET = "a secret of the server"
_DATE = "Tue, 21 Oct 2025 07:28:00 GMT"


class FaultyS3:
    """A bucket in memory, for S3 requests of obstore.

    Args:
        certificates: for HTTPS; None for HTTP.

    Attributes:
        objects: bytes of the objects, by path.
        requests: method and path of each request, in order.
        fault: returns the status and the error's code to answer a request with, given its method,
            its path and whether it has a condition; None for a right answer.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, certificates: Certificates | None = None
    ) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.fault: Callable[[str, str, bool], tuple[int, str] | None] = lambda *_: None
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                bucket.answer(self)

            do_GET = do_HEAD = do_PUT = answer  # noqa: N815 - names of the base class

            def log_message(self, *_: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        if certificates is not None:
            context = certificates.context()
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if certificates is None else "https"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        for name in [each for each in os.environ if each.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in {
            "AWS_ENDPOINT_URL": f"{scheme}://127.0.0.1:{self._server.server_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def blocks(self) -> list[str]:
        """Names of the blocks that the bucket has, sorted."""
        return sorted(path.rpartition("/")[2] for path in self.objects if "/blocks/" in path)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        data = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        method, path = request.command, request.path.partition("?")[0]
        conditional = request.headers.get("If-None-Match") is not None
        self.requests.append((method, path))
        fault = self.fault(method, path, conditional)
        if fault is not None:
            _send(request, fault[0], _error(fault[1]))
        elif method == "PUT" and conditional and path in self.objects:
            _send(request, 412, _error("PreconditionFailed"))
        elif method == "PUT":
            self.objects[path] = data
            _send(request, 200)
        elif path in self.objects:
            _send(request, 200, self.objects[path])
        else:
            _send(request, 404, _error("NoSuchKey"))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client has hung up, such as one that does not trust the certificate."""


def _error(code: str) -> bytes:
    words = f"<Code>{code}</Code><Message>Some words.</Message>"
    return f"<Error>{words}<StringToSign>{SECRET}</StringToSign></Error>".encode()


def _send(request: BaseHTTPRequestHandler, status: int, body: bytes = b"") -> None:
    request.send_response(status)
    request.send_header("Content-Length", str(len(body)))
    request.send_header("ETag", '"x"')
    request.send_header("Last-Modified", _DATE)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
