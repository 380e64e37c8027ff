# SPDX-License-Identifier: Apache-2.0
"""Reads a trace file of any known format."""

from __future__ import annotations

import gzip
import io
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any, Protocol

from flexkv.plan import hashed, recording, tokens
from flexkv.plan.fields import AUTO, LineError, Starts, json_objects
from flexkv.plan.trace import Room, Trace
from flexkv.types.errors import TraceError
from flexkv.types.texts import exact

FORMS = (
    AUTO,
    recording.FORM,
    hashed.MOONCAKE,
    hashed.BAILIAN,
    hashed.SESSIONS,
    tokens.FORM,
)
STANDARD_INPUT = "-"
CUT = "in a last line whose end is missing"

_MOST_LINE = 1 << 28
"""The most characters of a line, or of an object over several lines. A prompt of a million tokens
takes about 8 MB."""
_MOST_PACKED = 128
_FREE_TEXT = 1 << 20
"""The most bytes for each byte that gzip made of them, and those that every file may have. Of eight
kinds of traces, gzip packed one prompt again and again best, 110 to 1. It can pack nonsense 1,030
to 1."""
_GZIP = b"\x1f\x8b"
_LINES = 200
_CHARACTERS = 1 << 24
"""So many lines or characters lie between two checks of what was read, and reports of progress."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a trace."""

    form: str = AUTO
    """One of `FORMS`."""
    block_tokens: int | None = None
    """None for the number in the file, or 16."""
    unit: str = AUTO
    """`AUTO`, or one of `fields.UNITS`."""
    sessions_per_hour: float | None = None
    """Needed if the file does not have the starts of sessions."""


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace that was read. It has at least one request with a complete block."""

    trace: Trace
    measured: recording.Measured | None = None
    """The hits that the engine counted; None if the file does not have them."""
    made_starts: int = 0
    """The number of sessions whose start is not in the file."""


class _Parser(Protocol):
    def add(self, line: Mapping[str, object]) -> None: ...

    def trace(self, name: str) -> Trace: ...


def read_trace(
    path: str,
    reading: ReadOptions | None = None,
    progress: Callable[[float | None], None] = lambda share: None,
) -> TraceFile:
    """Read a regular file, or `STANDARD_INPUT`, which may be compressed by gzip. `progress` is
    called from time to time with the share of the file that was read; None for standard input,
    whose length is unknown. Raises TraceError if the file cannot be read, is no trace of that
    format, or takes too much memory."""
    reading = reading or ReadOptions()
    name = "standard input" if path == STANDARD_INPUT else path
    try:
        with _opened(path) as (file, text):
            found = _read(name, _checked(_lines(text), file, progress), reading)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(
            f"cannot read {path!r} from TRACE on the command line: {reason}; allowed: a text file, "
            f"one that gzip made of it, or {STANDARD_INPUT} for standard input"
        ) from None
    trace = found.trace
    if not trace.blocks:
        raise TraceError(
            f"{path!r} from TRACE on the command line has no prompt with a complete block of "
            f"{trace.block_tokens} tokens"
            + "".join(f", and {count} requests {why}" for why, count in trace.skipped.items())
            + "; allowed: a trace with longer prompts, with all their ids"
        )
    if reading.sessions_per_hour is not None and not found.made_starts:
        raise TraceError(
            f"'{exact(reading.sessions_per_hour)}' from --sessions-per-hour has no use, because "
            f"{path!r} has the start of every session; allowed: no --sessions-per-hour"
        )
    return found


class _Counted(io.FileIO):
    """A file that counts the bytes that were read, of a pipe too."""

    bytes = 0

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self.bytes += count or 0
        return count


class _Unpacked(gzip.GzipFile):
    """What gzip packed. A small file becomes no large text."""

    def __init__(self, raw: IO[bytes], file: _Counted) -> None:
        super().__init__(fileobj=raw)
        self._file = file

    def read1(self, size: int = -1) -> bytes:
        if self.tell() > _FREE_TEXT + _MOST_PACKED * self._file.bytes:
            raise OSError(0, f"gzip made it smaller than 1/{_MOST_PACKED}; unpack it before")
        return super().read1(size)


@contextmanager
def _opened(path: str) -> Iterator[tuple[_Counted, IO[str]]]:
    """Open a regular file or standard input: the file, and the text in it. Refuses other kinds of
    files, because opening a FIFO would wait for a writer."""
    if path == STANDARD_INPUT:
        if sys.stdin.isatty():
            raise OSError(0, "standard input is a terminal")
        file = _Counted(os.dup(sys.stdin.fileno()))
    else:
        file = _Counted(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    with io.BufferedReader(file) as raw:
        if path != STANDARD_INPUT and not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
            raise OSError(0, "not a regular file")
        packed = raw.peek(2)[:2] == _GZIP
        data: IO[bytes] = _Unpacked(raw, file) if packed else raw  # type: ignore[assignment]
        # Programs of Windows begin a file by a byte order mark.
        with io.TextIOWrapper(data, encoding="utf-8-sig") as text:
            yield file, text


def _lines(file: IO[str]) -> Iterator[tuple[int, str]]:
    """The lines with their numbers. A JSON object over several lines, whose first is `{` and whose
    last begins with `}`, counts as one. Of a longer line, its first characters come."""
    number = 0
    while line := file.readline(_MOST_LINE):
        number += 1
        if line.rstrip() == "{":
            first, whole = number, io.StringIO()
            whole.write(line)
            while whole.tell() < _MOST_LINE and (line := file.readline(_MOST_LINE)):
                number += 1
                whole.write(line)
                if line.startswith("}"):
                    break
            yield first, whole.getvalue()
        else:
            yield number, line


def _checked(
    lines: Iterable[tuple[int, str]], file: _Counted, progress: Callable[[float | None], None]
) -> Iterator[tuple[int, str]]:
    """The lines that are not empty. Reports the progress. Raises TraceError if what was read takes
    too much memory."""
    status, room = os.fstat(file.fileno()), Room()
    whole = status.st_size if stat.S_ISREG(status.st_mode) else 0
    characters = 0
    for count, (number, line) in enumerate(lines):
        if count % _LINES == 0 or characters >= _CHARACTERS:
            progress(min(1.0, file.bytes / whole) if whole else None)
            room.check()
            characters = 0
        characters += len(line)
        if not line.isspace():
            yield number, line


def _read(path: str, lines: Iterable[tuple[int, str]], reading: ReadOptions) -> TraceFile:
    parser: _Parser | None = None
    starts = Starts(reading.sessions_per_hour)
    cut = 0
    for number, line in lines:
        if len(line) >= _MOST_LINE:
            if parser is not None and not line.strip("\0"):
                cut = 1  # a power failure left zeros behind the last line
                break
            raise TraceError(
                f"line {number} of {path!r} from TRACE on the command line has {len(line):,} "
                f"characters or more; allowed: below {_MOST_LINE:,}"
            )
        if parser is None:
            known = _form_of(line) if reading.form == AUTO else reading.form
            if known is None:
                continue
            parser = _parser(known, reading, starts)
        try:
            # Files of one object each may have been joined without a line end between them.
            for content in json_objects(line):
                parser.add(content)
        except LineError as error:
            if error.is_cut and not line.endswith("\n"):
                cut = 1  # the writer of the file was stopped in the middle of the line
                break
            raise TraceError(f"line {number} of {path!r}: {error}") from None
    if parser is None:
        raise TraceError(
            f"{path!r} from TRACE on the command line has no line of a known trace; allowed: JSONL "
            f"with hash_ids or prompt_token_ids, or a recording of FlexKV ({', '.join(FORMS[1:])})"
        )
    trace = parser.trace(path)
    if cut:
        trace = replace(trace, skipped={**trace.skipped, CUT: cut})
    measured = parser.measured if isinstance(parser, recording.RecordingParser) else None
    return TraceFile(trace, measured, starts.count)


def _form_of(line: str) -> str | None:
    if not line.startswith("{"):
        return None
    try:
        content = next(json_objects(line))
    except LineError:
        return None
    if recording.recognises(content):
        return recording.FORM
    return hashed.form_of(content) or (tokens.FORM if tokens.recognises(content) else None)


def _parser(form: str, reading: ReadOptions, starts: Starts) -> _Parser:
    if form in (recording.FORM, hashed.SESSIONS) and reading.block_tokens is not None:
        raise TraceError(
            f"{reading.block_tokens} from --block-tokens cannot be used with the format {form}, "
            "which names the size of its blocks; allowed: no --block-tokens"
        )
    if form == recording.FORM and reading.unit != AUTO:
        raise TraceError(
            f"{reading.unit!r} from --time-unit cannot be used with the format {form}, whose times "
            "have a known unit; allowed: no --time-unit"
        )
    if form == recording.FORM:
        return recording.RecordingParser()
    if form == hashed.SESSIONS:
        return hashed.SessionParser(reading.unit, starts)
    if form == tokens.FORM:
        return tokens.TokenParser(reading.block_tokens, reading.unit)
    return hashed.HashedParser(form, reading.block_tokens, reading.unit, starts)
