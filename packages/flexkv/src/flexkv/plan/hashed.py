# SPDX-License-Identifier: Apache-2.0
"""Traces with lengths and a hash for each block of a prompt: Mooncake's, and those made like it.

Each line is an object with `timestamp`, `input_length` and `output_length` in tokens, and
`hash_ids`: numbers or texts. Equal ids behind equal ids mean equal prefixes. The last id may stand
for an incomplete block, which FlexKV does not cache.

- Mooncake: milliseconds, usually 512 tokens a block. Benchmark clients, such as aiperf, write
  further turns of a `session_id` with a `delay` instead of a `timestamp`.
- Qwen-Bailian: seconds, 16 tokens a block, and `chat_id` with `parent_chat_id`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from flexkv.plan.clock import MILLISECONDS, SECONDS, Clock, Starts
from flexkv.plan.fields import LineError, natural, show
from flexkv.plan.trace import Prefixes, Trace, TracedRequest

MOONCAKE, BAILIAN = "mooncake", "bailian"
_UNITS = {MOONCAKE: MILLISECONDS, BAILIAN: SECONDS}
_USUAL_BLOCKS = (16, 32, 64, 128, 256, 512, 1024)
"""The tokens of a block that are tried if the user names none."""
_TEXTS = {"text_input", "input_text", "messages", "payload"}
"""Fields of benchmark clients that have a prompt's text in place of its hashes."""
NO_HASHES = "without hash_ids"
_MOONCAKES, _BAILIANS = 512, 16
"""Tokens of a block in the published traces."""


def form_of(line: Mapping[str, object]) -> str | None:
    """The format of a trace with this line; None for another kind of trace."""
    if "hash_ids" not in line:
        return None
    return BAILIAN if "parent_chat_id" in line else MOONCAKE


class HashedParser:
    """Reads the lines of one trace. If `block_tokens` is None, a block has the tokens of the
    published traces if they fit all lines, else the largest usual size that fits. `starts` are for
    sessions whose first line has no time."""

    def __init__(self, form: str, block_tokens: int | None, unit: str, starts: Starts) -> None:
        self._form = form
        self._sizes = list(_USUAL_BLOCKS if block_tokens is None else (block_tokens,))
        self._clock = Clock(unit, _UNITS[form])
        self._starts = starts
        self._skipped = 0
        self._latest: dict[str, float] = {}
        self._roots: dict[object, str] = {}
        self._rows: list[tuple[float, int, int, list[Hashable], str]] = []

    def add(self, line: Mapping[str, object]) -> None:
        """Read one line.

        Raises:
            LineError: the line violates the format.
        """
        if "hash_ids" not in line and not _TEXTS.isdisjoint(line):
            self._skipped += 1
            return
        ids = hashes(line)
        prompt = natural(line, "input_length", least=1)
        fitting = [size for size in self._sizes if len(ids) in (prompt // size, -(-prompt // size))]
        if not fitting:
            sizes = " or ".join(map(str, self._sizes))
            raise LineError(
                "hash_ids",
                f"{len(ids)} ids for {prompt} tokens",
                f"one for each block of {sizes} tokens (see --block-tokens)",
            )
        self._sizes = fitting
        output = natural(line, "output_length") if "output_length" in line else 0
        session = self._session(line)
        self._rows.append((self._seconds(line, session), prompt, output, ids, session))

    def trace(self, name: str) -> Trace:
        """Make a trace of all lines so far."""
        usual = _BAILIANS if self._form == BAILIAN else _MOONCAKES
        size = usual if usual in self._sizes else max(self._sizes)
        prefixes, requests = Prefixes(), []
        for seconds, prompt, output, ids, session in sorted(self._rows, key=lambda row: row[0]):
            blocks = prefixes.follow(ids[: prompt // size])
            requests.append(TracedRequest(seconds, blocks, (), prompt, output, session))
        skipped = {NO_HASHES: self._skipped} if self._skipped else {}
        return Trace(name, self._form, size, requests, len(prefixes), skipped=skipped)

    def _session(self, line: Mapping[str, object]) -> str:
        if self._form != BAILIAN:
            session = line.get("session_id")
            return "" if session is None else str(session)
        chat, parent = line.get("chat_id"), line.get("parent_chat_id")
        has_parent = parent is not None and parent != -1
        root = self._roots.get(parent, str(parent)) if has_parent else str(chat)
        self._roots[chat] = root
        return root

    def _seconds(self, line: Mapping[str, object], session: str) -> float:
        if line.get("timestamp") is not None or not session:
            seconds = self._clock.seconds(line, "timestamp")
        elif session in self._latest:
            seconds = self._latest[session] + self._clock.duration(line, "delay")
        else:
            seconds = self._starts.next()
        if session:
            self._latest[session] = seconds
        return seconds


def hashes(line: Mapping[str, object]) -> list[Hashable]:
    """Read the hashes of a prompt's blocks.

    Raises:
        LineError: they are missing, or neither numbers nor texts.
    """
    ids = line.get("hash_ids")
    if not isinstance(ids, list) or any(type(each) not in (int, str) for each in ids):
        raise LineError("hash_ids", show(ids), "a list of whole numbers or texts")
    return ids
