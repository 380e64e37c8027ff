# SPDX-License-Identifier: Apache-2.0
"""Clients that send prompts until they are told to stop, and note how each request ended."""

from __future__ import annotations

import contextlib
import enum
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from integration.campaign.prompts import Question

LIMIT_SECONDS = 300.0
"""Of each request. Far beyond what one takes on a busy machine: whatever takes longer hangs."""
_ABORTED_SHARE = 0.12
_ABORT_WITHIN_SECONDS = 1.0
_LIMITED_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Wire:
    """How a server is asked over HTTP.

    Attributes:
        path: that requests are posted to.
        body: of a request for a question, with parameters of FlexKV if the engine passes such on.
        tokens: of an answer.
    """

    path: str
    body: Callable[[Question, Mapping[str, int] | None], dict[str, Any]]
    tokens: Callable[[str], list[int]]


class Outcome(enum.StrEnum):
    RIGHT = "the tokens that the engine gives without FlexKV"
    WRONG = "other tokens"
    ABORTED = "the client hung up"
    FAILED = "an error"
    HUNG = "no answer in time"


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        question: number of its prompt.
        begun, ended: time.monotonic().
        outcome: how it ended.
        detail: the error, or the tokens if they are wrong.
    """

    question: int
    begun: float
    ended: float
    outcome: Outcome
    detail: str = ""


class Clients:
    """Threads that each send one request after another.

    Args:
        address: host and port of the server.
        wire: how it is asked.
        questions: to draw from.
        seed: decides who asks what, and hangs up when.
        count: of threads.
    """

    def __init__(
        self,
        address: tuple[str, int],
        wire: Wire,
        questions: Sequence[Question],
        seed: int,
        count: int,
    ) -> None:
        self._address = address
        self._wire = wire
        self._questions = questions
        self._requests: list[Request] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._run, args=(random.Random(f"client {seed} {i}"),), daemon=True
            )
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def requests(self) -> list[Request]:
        """Those that have ended."""
        with self._lock:
            return list(self._requests)

    def stop(self) -> list[Request]:
        """Send no more, wait for what runs; all requests."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return self.requests()

    def _run(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            # Some prompts are asked for far more often than others, as users do.
            number = int(len(self._questions) * rng.random() ** 2)
            abort = rng.random() < _ABORTED_SHARE
            patience = rng.uniform(0, _ABORT_WITHIN_SECONDS) if abort else None
            params = None
            if rng.random() < _LIMITED_SHARE:
                params = {"flexkv.max_load_tokens": rng.randrange(1000)}
            question = self._questions[number]
            request = ask(
                self._address, self._wire, number, question, patience=patience, params=params
            )
            with self._lock:
                self._requests.append(request)
            if request.outcome is Outcome.FAILED:
                self._stop.wait(0.2)  # a server that is gone must not be asked in a tight loop


def ask(
    address: tuple[str, int],
    wire: Wire,
    number: int,
    question: Question,
    *,
    patience: float | None = None,
    params: dict[str, int] | None = None,
) -> Request:
    """Send one request; a client with `patience` hangs up after so many seconds."""
    body = json.dumps(wire.body(question, params))
    timeout = LIMIT_SECONDS if patience is None else max(patience, 0.001)
    begun = time.monotonic()

    def ended(outcome: Outcome, detail: str = "") -> Request:
        return Request(number, begun, time.monotonic(), outcome, detail)

    connection = http.client.HTTPConnection(*address, timeout=timeout)
    try:
        connection.request("POST", wire.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except TimeoutError:
        return ended(Outcome.HUNG if patience is None else Outcome.ABORTED)
    except (http.client.HTTPException, OSError) as error:
        return ended(Outcome.FAILED, f"{type(error).__name__}: {error}")
    finally:
        _hang_up(connection)
    if response.status != http.client.OK:
        return ended(Outcome.FAILED, f"{response.status}: {text[:300]}")
    tokens = wire.tokens(text)
    if tuple(tokens) == question.answer:
        return ended(Outcome.RIGHT)
    return ended(Outcome.WRONG, f"{tokens} instead of {list(question.answer)}")


def _hang_up(connection: http.client.HTTPConnection) -> None:
    if connection.sock is not None:
        with contextlib.suppress(OSError):  # the other end was faster
            connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
