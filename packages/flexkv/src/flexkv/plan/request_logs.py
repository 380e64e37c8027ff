# SPDX-License-Identifier: Apache-2.0
"""Reads requests with token ids from the logs of vLLM and SGLang, which also have other lines.

vLLM logs ids with `--enable-log-requests` at level DEBUG. SGLang logs them with `--log-requests
--log-requests-level 3`, as text or JSON. Other programs may write one JSON object per request, with
`prompt_token_ids` and optionally `output_token_ids`, `timestamp` in seconds, `request_id` and
`session`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from flexkv.plan.clock import SECONDS, Clock, date_seconds
from flexkv.plan.fields import LineError, json_object, show
from flexkv.plan.tokens import LEAST_TOKEN, MOST_TOKEN, TokenRequests
from flexkv.plan.trace import Trace

VLLM, SGLANG, TOKENS = "vllm", "sglang", "tokens"
FLAGS = {
    VLLM: "--enable-log-requests, and VLLM_LOGGING_LEVEL=DEBUG",
    SGLANG: "--log-requests --log-requests-level 3",
}
"""What makes an engine log the ids of prompts."""
NO_IDS = "without token ids, or with ids that the log has shortened"
_YEAR = 2000
"""The year of vLLM's log lines, which name none. This year has a 29 February."""
_YEAR_SECONDS = 366 * 86400.0

_VLLM_TIME = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_VLLM_REQUEST = re.compile(r"(?:Request (\S+) details|Received request (\S+)): prompt: ")
_VLLM_RECEIVED = re.compile(r"Received request (\S+): params: ")
"""This line has no ids. With VLLM_LOGGING_LEVEL=DEBUG, a line with ids comes before it."""
_VLLM_ANSWER = re.compile(r"Generated response (\S+)( \(streaming (?:delta|complete)\))?")
_SGLANG_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)")
_SGLANG_ID = re.compile(r"\brid='([^']*)'")
_RECEIVED = ("Receive: obj=GenerateReqInput(", '"event": "request.received"')
_FINISHED = ("Finish: obj=GenerateReqInput(", '"event": "request.finished"')


def form_of(line: str) -> str | None:
    """The format of the log that has this line; None if the line is not about a request."""
    if _RECEIVED[0] in line or _FINISHED[0] in line:
        return SGLANG
    if line.startswith("{"):
        if _RECEIVED[1] in line or _FINISHED[1] in line:
            return SGLANG
        return TOKENS if '"prompt_token_ids"' in line else None
    with_ids = _VLLM_REQUEST.search(line) and "prompt_token_ids: " in line
    return VLLM if with_ids or _VLLM_RECEIVED.search(line) else None


class Parser:
    """Reads the lines of one log. Ignores lines that are not about requests.

    Args:
        form: format of the log.
        block_tokens: tokens of a block.
        unit: unit of time of JSON objects, as for `Clock`. Engines log dates.
    """

    def __init__(self, form: str, block_tokens: int, unit: str) -> None:
        self._form = form
        self._clock = Clock(unit, SECONDS)
        self._objects = 0
        self._with_ids: set[str] = set()
        self._without_ids: set[str] = set()
        self._requests = TokenRequests(block_tokens)
        self._read = {VLLM: self._vllm, SGLANG: self._sglang, TOKENS: self._tokens}[form]
        self._last_time = 0.0
        self._streamed: set[str] = set()

    def add(self, line: str) -> None:
        """Read one line.

        Raises:
            LineError: the line is about a request and violates the format.
        """
        try:
            self._read(line)
        except OverflowError:
            raise LineError(
                "a token id", "out of range", f"a whole number from {LEAST_TOKEN} to {MOST_TOKEN}"
            ) from None

    def trace(self, name: str) -> Trace:
        """Make a trace of all lines so far."""
        count = len(self._without_ids)
        return self._requests.trace(name, self._form, {NO_IDS: count} if count else {})

    def _vllm(self, line: str) -> None:
        begun = _VLLM_REQUEST.search(line)
        if begun is not None:
            ids = _ids_behind(line, "prompt_token_ids: ", (", ",))
            self._begin(begun[1] or begun[2], self._vllm_time(line), ids)
            return
        received = _VLLM_RECEIVED.search(line)
        if received is not None:
            self._begin(received[1], self._vllm_time(line), None)
            return
        ended = _VLLM_ANSWER.search(line)
        ids = None
        if ended is not None:
            ids = _ids_behind(
                line.rstrip() + "\n", "output_token_ids: ", ("\n", ", finish_reason: ")
            )
        if ended is None or ids is None:
            return
        # At the end of a streamed answer, vLLM logs the whole answer again.
        if ended[2] and "delta" in ended[2]:
            self._streamed.add(ended[1])
        elif ended[1] in self._streamed:
            return
        self._requests.answer(ended[1].rstrip(":"), ids)

    def _vllm_time(self, line: str) -> float:
        found = _VLLM_TIME.search(line)
        if found is None:
            return self._last_time
        month, day, hour, minute, second = map(int, found.groups())
        try:
            when = datetime(_YEAR, month, day, hour, minute, second, tzinfo=UTC).timestamp()
        except ValueError:
            raise LineError("the time", found[0], "MONTH-DAY HOUR:MINUTE:SECOND") from None
        while when < self._last_time - _YEAR_SECONDS / 2:
            when += _YEAR_SECONDS
        self._last_time = when
        return when

    def _sglang(self, line: str) -> None:
        if line.startswith("{"):
            self._sglang_json(line)
            return
        received, finished = _RECEIVED[0] in line, _FINISHED[0] in line
        found = _SGLANG_ID.search(line) if received or finished else None
        if found is None:
            return
        if received:
            when = _SGLANG_TIME.search(line)
            seconds = self._last_time if when is None else date_seconds(when[1])
            self._begin(found[1], seconds, _ids_behind(line, "input_ids="))
        else:
            self._requests.answer(found[1], _ids_behind(line, "'output_ids': ") or [])

    def _sglang_json(self, line: str) -> None:
        content = json_object(line)
        event, rid = content.get("event"), content.get("rid")
        if not isinstance(rid, str):
            return
        if event == "request.received":
            obj = content.get("obj")
            ids = _ids(obj.get("input_ids")) if isinstance(obj, dict) else None
            self._begin(rid, date_seconds(content.get("timestamp")), ids)
        elif event == "request.finished":
            out = content.get("out")
            ids = _ids(out.get("output_ids")) if isinstance(out, dict) else None
            self._requests.answer(rid, ids or [])

    def _tokens(self, line: str) -> None:
        content = json_object(line)
        if "prompt_token_ids" not in content:
            return
        prompt = _ids(content["prompt_token_ids"])
        if prompt is None:
            raise LineError(
                "prompt_token_ids", show(content["prompt_token_ids"]), "a list of token ids"
            )
        timed = "timestamp" in content
        seconds = self._clock.seconds(content, "timestamp") if timed else self._last_time
        self._objects += 1
        name = str(content.get("request_id") or f"object {self._objects}")
        self._begin(name, seconds, prompt, str(content.get("session") or ""))
        output = content.get("output_token_ids")
        if output is not None:
            ids = _ids(output)
            if ids is None:
                raise LineError("output_token_ids", show(output), "a list of token ids")
            self._requests.answer(name, ids)

    def _begin(
        self, name: str, seconds: float, ids: Sequence[int] | None, session: str = ""
    ) -> None:
        self._last_time = max(self._last_time, seconds)
        if ids:
            self._requests.add(name, seconds, ids, session)
            self._with_ids.add(name)
        elif name not in self._with_ids:
            self._without_ids.add(name)


def _ids_behind(line: str, name: str, followed: tuple[str, ...] = ("",)) -> list[int] | None:
    """Parse the list of token ids behind the last `name` in a line.

    A prompt's or an answer's text may contain the same words, but comes before the ids or within
    quotes. One of `followed` must therefore come behind the list.

    Returns:
        The ids; None if there is no such list, or the log has shortened it.
    """
    start = line.rfind(name)
    start += len(name)
    if start < len(name) or not line.startswith("[", start):
        return None
    stop = line.find("]", start)
    if stop < 0 or line.startswith(" ... ", stop + 1) or not line.startswith(followed, stop + 1):
        return None
    text = line[start + 1 : stop].strip()
    try:
        return [int(each) for each in text.split(",")] if text else []
    except ValueError:
        return None


def _ids(value: object) -> list[int] | None:
    """The list of token ids; None if `value` is none, or the log has shortened it."""
    if not isinstance(value, list) or any(type(each) is not int for each in value):
        return None
    return value
