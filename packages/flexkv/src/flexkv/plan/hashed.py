# SPDX-License-Identifier: Apache-2.0
"""Traces with lengths and a hash for each block of a prompt, `hash_ids`: numbers or texts. Equal
ids behind equal ids mean equal prefixes. The last id may stand for an incomplete block, which
FlexKV does not cache.

Mooncake's, and those made like it: each line is an object with `timestamp`, and `input_length` and
`output_length` in tokens.

- Mooncake: milliseconds, usually 512 tokens a block. Benchmark clients, such as aiperf, write
  further turns of a `session_id` with a `delay` instead of a `timestamp`.
- Qwen-Bailian: seconds, 16 tokens a block, and `chat_id` with `parent_chat_id`.

Those of agents by session, as kv-cache-tester and InferenceX publish them: each object is a session
with `block_size` in tokens and `requests`. A request has `t` in seconds since the session's start,
and `in` and `out` in tokens. An entry of type `subagent` has further `requests`. Ids mean the same
in several sessions only if `hash_id_scope` is `global`. The starts of sessions are not in the file.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from flexkv.plan.fields import MILLISECONDS, SECONDS, Clock, LineError, Starts, natural, show
from flexkv.plan.trace import NO_BLOCK, Prefixes, Trace, TracedRequest

MOONCAKE, BAILIAN, SESSIONS = "mooncake", "bailian", "sessions"
_UNITS = {MOONCAKE: MILLISECONDS, BAILIAN: SECONDS}
_USUAL_BLOCKS = (16, 32, 64, 128, 256, 512, 1024)
"""The tokens of a block that are tried if the user names none."""
_TEXTS = {"text_input", "input_text", "messages", "payload"}
"""Fields of benchmark clients that have a prompt's text in place of its hashes."""
_NO_HASHES = "without hash_ids"
_MOONCAKES, _BAILIANS = 512, 16
"""Tokens of a block in the published traces."""


def form_of(line: Mapping[str, object]) -> str | None:
    """The format of a trace with this line; None for another kind of trace."""
    if "requests" in line and "block_size" in line:
        return SESSIONS
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
        """Read one line. Raises LineError if the line violates the format."""
        if "hash_ids" not in line and not _TEXTS.isdisjoint(line):
            self._skipped += 1
            return
        ids = _hashes(line)
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
        skipped = {_NO_HASHES: self._skipped} if self._skipped else {}
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


class SessionParser:
    """Reads the sessions of one trace."""

    def __init__(self, unit: str, starts: Starts) -> None:
        self._clock_unit = unit
        self._starts = starts
        self._size = 0
        self._sessions = 0
        self._skipped = 0
        self._rows: list[tuple[float, int, int, list[Hashable], int, str]] = []

    def add(self, line: Mapping[str, object]) -> None:
        """Read one session. Raises LineError if the object violates the format."""
        size = natural(line, "block_size", least=1)
        if self._size not in (0, size):
            raise LineError("block_size", str(size), f"{self._size}, as before")
        self._size = size
        self._sessions += 1
        root = NO_BLOCK if line.get("hash_id_scope") == "global" else NO_BLOCK - self._sessions
        name = str(line.get("id") or self._sessions)
        self._requests(line.get("requests"), self._starts.next(), root, name)

    def trace(self, name: str) -> Trace:
        """Make a trace of all sessions so far."""
        prefixes, requests = Prefixes(), []
        size = self._size
        for seconds, prompt, output, ids, root, session in sorted(
            self._rows, key=lambda row: row[0]
        ):
            blocks = prefixes.follow(ids[: prompt // size], root)
            requests.append(TracedRequest(seconds, blocks, (), prompt, output, session))
        skipped = {_NO_HASHES: self._skipped} if self._skipped else {}
        return Trace(name, SESSIONS, size, requests, len(prefixes), skipped=skipped)

    def _requests(self, entries: object, start: float, root: int, session: str) -> None:
        if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
            raise LineError("requests", show(entries), "a list of objects")
        clock = Clock(self._clock_unit, SECONDS)
        for number, entry in enumerate(entries):
            if "requests" in entry:
                # Times of a subagent begin at 0, or are those of its session.
                inner = entry["requests"]
                first = inner[0] if isinstance(inner, list) and inner else None
                since = clock.seconds(entry, "t") if "t" in entry else 0.0
                if isinstance(first, dict) and "t" in first and clock.seconds(first, "t") >= since:
                    since = 0.0
                self._requests(inner, start + since, root, f"{session}/{number}")
            elif "hash_ids" in entry:
                seconds = start + clock.seconds(entry, "t")
                prompt, output = natural(entry, "in", least=1), natural(entry, "out")
                self._rows.append((seconds, prompt, output, _hashes(entry), root, session))
            else:
                self._skipped += 1


def _hashes(line: Mapping[str, object]) -> list[Hashable]:
    """Read the hashes of a prompt's blocks. Raises LineError if they are missing, or neither
    numbers nor texts."""
    ids = line.get("hash_ids")
    if not isinstance(ids, list) or any(type(each) not in (int, str) for each in ids):
        raise LineError("hash_ids", show(ids), "a list of whole numbers or texts")
    return ids
