# SPDX-License-Identifier: Apache-2.0
"""The operators' door of the service: HTTP on a socket in its directory, and on a port if one is
wanted. The port shows figures only.

    GET /metrics    the metrics, in Prometheus's text format
    GET /health     200 with what is wrong, or 503 if the service's loop does not answer
    GET /state      `ServiceState`; on the socket only
    POST /clear     clear pools, `?fingerprint=` for one; `Cleared`; on the socket only

Threads of the door answer. What they say of the service its loop tells them, within
`_LOOP_SECONDS`. So nobody who asks can delay an engine by more than one such look.
"""

from __future__ import annotations

import contextlib
import http.server
import logging
import socket
import socketserver
import threading
import time
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from flexkv.service.messages import is_same_user
from flexkv.service.pool_metrics import exposition
from flexkv.service.state import Cleared, ServiceState
from flexkv.settings import CacheConfig

logger = logging.getLogger(__name__)

_LOOP_SECONDS = 2.0
"""Seconds within which the service's loop must answer. It mostly takes milliseconds. Not tuned."""
_PEER_SECONDS = 5.0
"""Seconds of silence after which a peer is dismissed. Not tuned."""
_MOST_PEERS = 16
"""Peers at a time. One more, and the oldest is dismissed. Not tuned."""
_ACCEPT_SECONDS = 0.1
"""Pause after a peer could not be accepted, for lack of descriptors. Not tuned."""


_TEXT, _JSON = "text/plain; charset=utf-8", "application/json"


class SilentLoopError(Exception):
    """The service's loop has not come to a request in time."""


class Served(Protocol):
    """What the door asks of the service. All calls come in threads of the door, and wait for the
    service's loop for so many seconds."""

    config: CacheConfig

    def state(self, seconds: float) -> ServiceState:
        """The state now; raises SilentLoopError."""
        ...

    def clear(self, fingerprint: str | None, seconds: float) -> Cleared:
        """Clear the pool of a fingerprint, or all pools; raises SilentLoopError, LookupError."""
        ...


class OperatorDoor:
    """Answers on one listening socket, in threads of its own, until `close`.

    Args:
        listener: of SOCK_STREAM; owned.
        served: answers for the service.
        figures_only: whether peers may be any process of the network. Else they are this user's,
            and may clear the service.
    """

    def __init__(self, listener: socket.socket, served: Served, *, figures_only: bool) -> None:
        self._server = _Server(listener, served, figures_only)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="flexkv-operators", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer no more. Peers that are being answered are left to their threads."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def listen_at(host: str, port: int) -> socket.socket:
    """A listening socket of the network.

    Raises:
        OSError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket, served: Served, figures_only: bool) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.served = served
        self.figures_only = figures_only
        self._peers: dict[socket.socket, None] = {}  # the oldest first
        self._guard = threading.Lock()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return self.socket.accept()
        except OSError:
            time.sleep(_ACCEPT_SECONDS)  # the peer waits on, and select reports it at once
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self.figures_only or is_same_user(request)

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
        asked = urlsplit(self.path)
        calls = {("GET", "/metrics"): self._metrics, ("GET", "/health"): self._health}
        if not self.server.figures_only:
            calls |= {("GET", "/state"): self._state, ("POST", "/clear"): self._clear}
        call = calls.get((method, asked.path))
        if call is None:
            paths = ", ".join(f"{each} {path}" for each, path in calls)
            self._send(HTTPStatus.NOT_FOUND, f"nothing is here; allowed: {paths}\n".encode())
            return
        try:
            content, kind = call()
        except SilentLoopError:
            text = f"the loop of the service has not answered for {_LOOP_SECONDS:g} s\n"
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, text.encode())
        except LookupError as error:
            self._send(HTTPStatus.BAD_REQUEST, f"{error}\n".encode())
        except Exception as error:
            logger.exception("an operator's request failed")
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error!r}\n".encode())
        else:
            self._send(HTTPStatus.OK, content, kind)

    def _metrics(self) -> tuple[bytes, str]:
        served = self.server.served
        return exposition(served.state(_LOOP_SECONDS), served.config), CONTENT_TYPE_LATEST

    def _health(self) -> tuple[bytes, str]:
        problems = self.server.served.state(_LOOP_SECONDS).problems
        text = "\n".join(problems) or "ok"
        return f"{text}\n".encode(), _TEXT

    def _state(self) -> tuple[bytes, str]:
        return msgspec.json.encode(self.server.served.state(_LOOP_SECONDS)), _JSON

    def _clear(self) -> tuple[bytes, str]:
        wanted = parse_qs(urlsplit(self.path).query).get("fingerprint", [None])
        return msgspec.json.encode(self.server.served.clear(wanted[0], _LOOP_SECONDS)), _JSON

    def _send(self, status: HTTPStatus, content: bytes, kind: str = _TEXT) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
