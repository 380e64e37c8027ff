# SPDX-License-Identifier: Apache-2.0
"""vllm-router with its policy `kv_aware`, in front of two workers that only answer.

The router's process is the real one, and so are the events that it follows. Its workers are servers
in this process: what they answer says nothing about where blocks are.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from integration.clients.router_process import START_SECONDS, RouterProcess

MODEL = "model"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_DECISION = re.compile(
    r'KV prefix decision .*worker="(?P<worker>[^"]*)".*credited_\w+=(?P<credit>\d+)'
)


class _Worker(BaseHTTPRequestHandler):
    """What the router asks of a vLLM server. A prompt is its token ids, written as a text."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""

    def do_GET(self) -> None:
        models = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        self._answer(models if "models" in self.path else {"status": "ok"})

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("render"):
            tokens = [int(each) for each in given["prompt"].split()]
            rendered = {"request_id": "r", "token_ids": tokens, "model": MODEL, "stream": False}
            params = {"max_tokens": 1}
            self._answer([rendered | {"sampling_params": params, "priority": 0}])
            return
        choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
        used = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        about = {"id": "c", "object": "text_completion", "created": 1, "model": MODEL}
        self._answer(about | {"choices": [choice], "usage": used})

    def _answer(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where the router sent a prompt.

    Attributes:
        to_engine: whether to the worker whose events it follows.
        credited: tokens that it took off its cost, because the worker has them.
    """

    to_engine: bool
    credited: int


class VllmRouter(RouterProcess):
    """The router and its two workers; a context manager that ends them.

    Args:
        program: path of the router.
        events: the ZeroMQ address of the events of an engine, which the first worker stands for.
        block_size: tokens of the engine's blocks.
        log: receives what the router prints.
    """

    def __init__(self, program: Path, events: str, block_size: int, log: Path) -> None:
        self._workers = contextlib.ExitStack()
        urls = [self._serve() for _ in range(2)]
        self._engine = urls[0]
        command: list[str | Path] = [
            *(program, "--log-level", "debug"),
            *("--worker-urls", *urls, "--worker-startup-check-interval", "1"),
            *("--policy", "kv_aware", "--kv-event-source", f"{self._engine}={events}"),
            *("--kv-event-block-size", str(block_size), "--kv-event-model", MODEL),
        ]
        super().__init__(command, log)

    def close(self) -> None:
        """End them. Idempotent."""
        super().close()
        self._workers.close()

    def send(self, prompt: Sequence[int]) -> Decision:
        """Send a prompt through the router."""
        known = len(self._decisions())
        text = " ".join(map(str, prompt))
        data = json.dumps({"model": MODEL, "prompt": text, "max_tokens": 1}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/v1/completions", data, headers)
        with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
            answer.read()
        late = time.monotonic() + START_SECONDS
        while len(found := self._decisions()) == known:
            assert time.monotonic() < late, "the router logs no decision"
            time.sleep(0.01)
        return found[-1]

    def _decisions(self) -> list[Decision]:
        lines = _COLOURS.sub("", self._log.read_text())
        return [
            Decision(found["worker"] == self._engine, int(found["credit"]))
            for found in _DECISION.finditer(lines)
        ]

    def _serve(self) -> str:
        """Start a worker. Returns its URL."""
        server = self._workers.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), _Worker))
        self._workers.callback(server.shutdown)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"
