# SPDX-License-Identifier: Apache-2.0
"""Traces with token ids, one JSON object a request: `prompt_token_ids`, and optionally
`output_token_ids`, `timestamp` in seconds and `session`."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence

from flexkv.plan.fields import SECONDS, Clock, LineError, show
from flexkv.plan.trace import Prefixes, Trace, TracedRequest

FORM = "tokens"
_PROMPT, _ANSWER = "prompt_token_ids", "output_token_ids"
_NO_IDS = "without token ids"
_USUAL_BLOCK = 16
"""Tokens of a block, if the user names no other number: the engines' default."""
_NAME_BYTES = 8
"""Bytes of a block's name. Among a million blocks that follow the same block, the chance that two
share a name is below 10^-7."""
_MOST_TOKEN = (1 << 32) - 1


def recognises(line: Mapping[str, object]) -> bool:
    """Whether a line of a trace looks like this format."""
    return _PROMPT in line


class TokenParser:
    """Reads the lines of one trace. Keeps digests of blocks, and no tokens."""

    def __init__(self, block_tokens: int | None, unit: str) -> None:
        self._size = block_tokens or _USUAL_BLOCK
        self._clock = Clock(unit, SECONDS)
        self._last_time = 0.0
        self._skipped = 0
        self._rows: list[tuple[float, int, int, list[bytes], str]] = []

    def add(self, line: Mapping[str, object]) -> None:
        """Read one line. One without `prompt_token_ids` is not about a request. Raises LineError if
        the line violates the format."""
        if _PROMPT not in line:
            return
        prompt = _ids(line, _PROMPT)
        answer = _ids(line, _ANSWER) if line.get(_ANSWER) is not None else []
        timed = "timestamp" in line
        seconds = self._clock.seconds(line, "timestamp") if timed else self._last_time
        self._last_time = max(self._last_time, seconds)
        if not prompt:
            self._skipped += 1
            return
        # The engine does not compute the last token of an answer.
        names = self._names([*prompt, *answer[:-1]])
        session = str(line.get("session") or "")
        self._rows.append((seconds, len(prompt), len(answer), names, session))

    def trace(self, name: str) -> Trace:
        """Make a trace of all lines so far."""
        prefixes, requests = Prefixes(), []
        for seconds, prompt, output, names, session in sorted(self._rows, key=lambda row: row[0]):
            chain, own = prefixes.follow(names), prompt // self._size
            requests.append(
                TracedRequest(seconds, chain[:own], chain[own:], prompt, output, session)
            )
        skipped = {_NO_IDS: self._skipped} if self._skipped else {}
        return Trace(name, FORM, self._size, requests, len(prefixes), skipped=skipped)

    def _names(self, tokens: Sequence[int]) -> list[bytes]:
        """Digests of the complete blocks."""
        try:
            ids = array("I", tokens)
        except OverflowError:
            allowed = f"a whole number from 0 to {_MOST_TOKEN}"
            raise LineError("a token id", "out of range", allowed) from None
        data, step = ids.tobytes(), self._size * ids.itemsize
        return [
            hashlib.blake2b(data[start : start + step], digest_size=_NAME_BYTES).digest()
            for start in range(0, len(data) // step * step, step)
        ]


def _ids(line: Mapping[str, object], field: str) -> list[int]:
    value = line.get(field)
    if not isinstance(value, list) or any(type(each) is not int for each in value):
        raise LineError(field, show(value), "a list of token ids")
    return value
