# SPDX-License-Identifier: Apache-2.0
"""Traces of agents by session, as kv-cache-tester and InferenceX publish them.

Each JSON object is a session with `block_size` in tokens and `requests`. A request has `t` in
seconds since the session's start, `in` and `out` in tokens, and `hash_ids`. An entry of type
`subagent` has further `requests`. Ids mean the same in several sessions only if `hash_id_scope` is
`global`. The starts of sessions are not in the file.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from flexkv.plan.clock import SECONDS, Clock, Starts
from flexkv.plan.fields import LineError, natural, show
from flexkv.plan.hashed import NO_HASHES, hashes
from flexkv.plan.trace import NO_BLOCK, Prefixes, Trace, TracedRequest

FORM = "sessions"


def recognises(value: Mapping[str, object]) -> bool:
    """Whether an object of a trace looks like this format."""
    return "requests" in value and "block_size" in value


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
        """Read one session.

        Raises:
            LineError: the object violates the format.
        """
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
        skipped = {NO_HASHES: self._skipped} if self._skipped else {}
        return Trace(name, FORM, size, requests, len(prefixes), skipped=skipped)

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
                self._rows.append((seconds, prompt, output, hashes(entry), root, session))
            else:
                self._skipped += 1
