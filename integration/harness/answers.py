# SPDX-License-Identifier: Apache-2.0
"""What an engine of the tests answers: tokens, or an error, to a request that may be under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

_LOG_TAIL_LINES = 60
# For what hangs; see the bounds of `engine`.
CALL_TIMEOUT = 600.0


class EngineError(RuntimeError):
    """The engine answered with an error, died, or did not answer in time."""


class EngineStartError(EngineError):
    """The engine did not start.

    ``log`` is all it wrote, ``killed`` the pids that did not end by themselves.
    """

    def __init__(self, message: str, log: str, killed: list[int]) -> None:
        tail = "\n".join(log.splitlines()[-_LOG_TAIL_LINES:])
        super().__init__(f"{message}\n--- last lines of the engine's log ---\n{tail}")
        self.log = log
        self.killed = killed


@dataclass(frozen=True, slots=True)
class Completion:
    """Outcome of one request.

    ``times`` holds, in seconds since the request was handed to vLLM, when each token arrived.
    ``cached_tokens`` counts prompt tokens that were not computed, from whichever cache they came.
    ``logprobs`` is empty unless asked for.
    """

    tokens: list[int]
    finish_reason: str | None
    cached_tokens: int | None = None
    times: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0]

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


class Generation:
    """A request under way.

    ``abort`` aborts it, and returns False when it had ended already.
    """

    def __init__(self, request_id: str, abort: Callable[[], bool]) -> None:
        self.request_id = request_id
        self.abort = abort
        self._first_token = threading.Event()
        self.future: Future[Any] = Future()
        # A request that ends without a token must not keep a waiter waiting.
        self.future.add_done_callback(lambda _: self._first_token.set())

    def note_first_token(self) -> None:
        """Called by the engine's reader."""
        self._first_token.set()

    def wait_first_token(self, timeout: float = CALL_TIMEOUT) -> None:
        """Wait until a token is there or the request has ended; EngineError after ``timeout``."""
        if not self._first_token.wait(timeout):
            raise EngineError(f"no token of {self.request_id} within {timeout:.0f} s")

    def result(self, timeout: float = CALL_TIMEOUT) -> Completion:
        """Wait for the end; EngineError when the engine fails or ``timeout`` passes."""
        return Completion(**await_answer(self.future, f"generate {self.request_id}", timeout))


def await_answer(future: Future[Any], what: str, timeout: float) -> Any:
    """Wait for an answer; EngineError says what was waited for."""
    try:
        return future.result(timeout)
    except TimeoutError as error:
        raise EngineError(f"no answer to {what} within {timeout:.0f} s") from error
