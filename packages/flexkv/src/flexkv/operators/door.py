# SPDX-License-Identifier: Apache-2.0
"""Answers HTTP on one listening socket, in threads of its own."""

from __future__ import annotations

import contextlib
import hmac
import http.server
import logging
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import msgspec

from flexkv.operators.verbs import Answers, RefusedError, SilentError, Verb
from flexkv.session.wire import peer_of

logger = logging.getLogger(__name__)

_PEER_SECONDS = 5.0
"""Seconds of silence after which a peer is dismissed."""
_MOST_PEERS = 16
"""Peers at a time. One more, and the oldest is dismissed."""
_MOST_BYTES = 16 << 20
"""The longest body of a question: a million token ids of up to 15 digits."""
_MOST_DIGITS = 20
"""Digits of the length of any body. Python refuses to read numbers of thousands."""
_ACCEPT_SECONDS = 0.1
"""Pause after a peer could not be accepted, for lack of descriptors."""

TEXT, JSON = "text/plain; charset=utf-8", "application/json"


class DoorRequest(NamedTuple):
    """One question: the parameters of its URL, of several with one name the last; and its body."""

    query: Mapping[str, str]
    body: bytes


Answer = Callable[[DoorRequest], tuple[bytes, str]]
Routes = Mapping[tuple[str, str], Answer]
"""By method and path what answers: returns the content and its type. Called by threads of the door,
several at once. Raises SilentError, RefusedError."""


def routes_of(answers: Answers) -> Routes:
    """The routes of verbs."""

    def route(verb: Verb[Any, Any], answer: Callable[[Any], object]) -> Answer:
        return lambda asked: (msgspec.json.encode(answer(verb.read(asked.body))), JSON)

    return {("POST", verb.path): route(verb, answer) for verb, answer in answers.items()}


class Door:
    """Answers the questions of `routes` until `close`, at a listening socket, which it owns. If
    `is_open`, peers may be any process of the network, else they are this user's, on a Unix socket.
    Each question must bear the token, if there is one."""

    def __init__(
        self, listener: socket.socket, routes: Routes, *, is_open: bool, token: str | None = None
    ) -> None:
        self._server = _Server(listener, routes, is_open, token)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="flexkv-operators", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer no more. Peers that are being answered are left to their threads."""
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes serve_forever
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def leave_to_parent(self) -> None:
        """As `flexkv.system.forks.Owner` says."""
        self._server.socket.close()


def listen_at(host: str, port: int) -> socket.socket:
    """A listening socket of the network. Raises OSError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True

    def __init__(
        self, listener: socket.socket, routes: Routes, is_open: bool, token: str | None
    ) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.routes = routes
        self._is_open = is_open
        self._bearer = None if token is None else f"Bearer {token}".encode()
        self._peers: dict[socket.socket, None] = {}  # the oldest first
        self._guard = threading.Lock()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return self.socket.accept()
        except OSError:
            time.sleep(_ACCEPT_SECONDS)  # the peer waits on, and select reports it at once
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._is_open or peer_of(request).uid == os.geteuid()

    def may_ask(self, authorization: str) -> bool:
        """Whether a question with this header bears the token."""
        if self._bearer is None:
            return True
        return hmac.compare_digest(authorization.encode("utf-8", "replace"), self._bearer)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            if len(self._peers) >= _MOST_PEERS:
                with contextlib.suppress(OSError):
                    next(iter(self._peers)).shutdown(socket.SHUT_RDWR)
                self._peers.pop(next(iter(self._peers)))
            self._peers[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._peers.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer has left, or was dismissed."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = _PEER_SECONDS
    server_version, sys_version = "FlexKV", ""

    def do_GET(self) -> None:
        """As the standard library calls it."""
        self._answer("GET")

    def do_POST(self) -> None:
        """As the standard library calls it."""
        self._answer("POST")

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""

    def _answer(self, method: str) -> None:
        url = urlsplit(self.path)
        routes = self.server.routes
        length = self.headers.get("Content-Length") or "0"
        is_number = length.isdecimal() and len(length) <= _MOST_DIGITS
        # Also of a question without an answer: unread, it would cut the connection before the peer
        # has read why.
        body = self.rfile.read(min(int(length), _MOST_BYTES)) if is_number else b""
        if not self.server.may_ask(self.headers.get("Authorization") or ""):
            self._send(HTTPStatus.UNAUTHORIZED, b"the token is missing or wrong\n")
            return
        call = routes.get((method, url.path))
        if call is None:
            paths = ", ".join(f"{each} {path}" for each, path in routes)
            self._send(HTTPStatus.NOT_FOUND, f"nothing is here; allowed: {paths}\n".encode())
            return
        if self.headers.get("Transfer-Encoding"):
            text = "the body is sent in parts; allowed: a body with its Content-Length\n"
            self._send(HTTPStatus.LENGTH_REQUIRED, text.encode())
            self._await_end()
            return
        if not is_number or int(length) > _MOST_BYTES:
            text = f"the body has {length} bytes; allowed: at most {_MOST_BYTES}\n"
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text.encode())
            return
        asked = DoorRequest(dict(parse_qsl(url.query)), body)
        try:
            content, kind = call(asked)
        except SilentError as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode())
        except RefusedError as error:
            self._send(HTTPStatus.BAD_REQUEST, f"{error}\n".encode())
        except Exception as error:
            logger.exception("an operator's request failed")
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error!r}\n".encode())
        else:
            self._send(HTTPStatus.OK, content, kind)

    def _await_end(self) -> None:
        """Take what the peer still sends until it has read the answer. Left unread, it would cut
        the connection before."""
        self.connection.shutdown(socket.SHUT_WR)
        left = _MOST_BYTES
        while left > 0 and (taken := self.rfile.read1(left)):
            left -= len(taken)

    def _send(self, status: HTTPStatus, content: bytes, kind: str = TEXT) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(content)
