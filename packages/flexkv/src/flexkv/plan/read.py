# SPDX-License-Identifier: Apache-2.0
"""Reads a trace file of any known format."""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Protocol

from flexkv.plan import clock, hashed, recording, request_logs, sessions
from flexkv.plan.fields import LineError, json_object, json_objects
from flexkv.plan.starts import Starts
from flexkv.plan.trace import Trace
from flexkv.types.errors import TraceError
from flexkv.types.texts import exact

AUTO = "auto"
FORMS = (
    AUTO,
    recording.FORM,
    hashed.MOONCAKE,
    hashed.BAILIAN,
    sessions.FORM,
    request_logs.VLLM,
    request_logs.SGLANG,
    request_logs.TOKENS,
)
STANDARD_INPUT = "-"
CUT = "in a last line whose end is missing"

_TIMED = (hashed.MOONCAKE, hashed.BAILIAN, sessions.FORM, request_logs.TOKENS)
"""Formats whose times are numbers of a unit that the user may name."""
_MOST_LINE = 1 << 28
"""The most characters of a line, or of an object over several lines. A prompt of a million tokens
takes about 8 MB."""
_LOG_BLOCK_TOKENS = 16
"""Tokens of a block of a log, if the user names no other number: the engines' default."""
_GZIP = b"\x1f\x8b"
_LINES = 200
_CHARACTERS = 1 << 24
"""So many lines or characters lie between two reports of the progress."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a trace.

    Attributes:
        form: one of `FORMS`.
        block_tokens: tokens of a block; None for the number in the file, or 16.
        unit: unit of its times: `clock.AUTO`, or one of `clock.UNITS`.
        sessions_per_hour: sessions that start in an hour, if the file does not have their starts.
    """

    form: str = AUTO
    block_tokens: int | None = None
    unit: str = clock.AUTO
    sessions_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace that was read.

    Attributes:
        trace: the requests, at least one, with at least one complete block.
        measured: the hits that the engine counted; None if the file does not have them.
        made_starts: the number of sessions whose start is not in the file.
    """

    trace: Trace
    measured: recording.Measured | None = None
    made_starts: int = 0


class _Parser(Protocol):
    def add(self, line: str) -> None: ...

    def finish(self, name: str) -> TraceFile: ...


def read_trace(
    path: str,
    reading: ReadOptions | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> TraceFile:
    """Read the file at `path`, which may be compressed by gzip.

    Args:
        path: path of a regular file, or `STANDARD_INPUT`.
        reading: how to read it; None for the defaults.
        progress: called from time to time with the share of the file that was read. Never called
            for standard input.

    Raises:
        TraceError: the file cannot be read, or is no trace of that format.
    """
    reading = reading or ReadOptions()
    name = "standard input" if path == STANDARD_INPUT else path
    try:
        with _opened(path) as (raw, text):
            found = _read(name, _reported(_lines(text), raw, progress), reading)
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
            + (f" ({_logging(trace.form)})" if trace.form in request_logs.FLAGS else "")
        )
    if reading.sessions_per_hour is not None and not found.made_starts:
        raise TraceError(
            f"'{exact(reading.sessions_per_hour)}' from --sessions-per-hour has no use, because "
            f"{path!r} has the start of every session; allowed: no --sessions-per-hour"
        )
    return found


@contextmanager
def _opened(path: str) -> Iterator[tuple[IO[bytes], IO[str]]]:
    """Open a regular file or standard input: the bytes, and the text in them. Refuses other kinds
    of files, because opening a FIFO would wait for a writer."""
    if path == STANDARD_INPUT:
        if sys.stdin.isatty():
            raise OSError(0, "standard input is a terminal")
        raw = open(os.dup(sys.stdin.fileno()), "rb")  # noqa: SIM115  (closed below)
    else:
        raw = open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")  # noqa: SIM115
    with raw:
        if path != STANDARD_INPUT and not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
            raise OSError(0, "not a regular file")
        packed = raw.peek(2)[:2] == _GZIP
        data: IO[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
        # Programs of Windows begin a file by a byte order mark.
        with io.TextIOWrapper(data, encoding="utf-8-sig") as text:
            yield raw, text


def _lines(file: IO[str]) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers. A JSON object over several lines, whose
    first is `{` and whose last begins with `}`, counts as one."""
    number = 0
    while line := file.readline(_MOST_LINE):
        number += 1
        if line.rstrip() == "{":
            first, size, lines = number, len(line), [line]
            while size < _MOST_LINE and (line := file.readline(_MOST_LINE)):
                number, size = number + 1, size + len(line)
                lines.append(line)
                if line.startswith("}"):
                    break
            yield first, "".join(lines)
        elif line.strip():
            yield number, line


def _reported(
    lines: Iterable[tuple[int, str]], raw: IO[bytes], progress: Callable[[float], None]
) -> Iterator[tuple[int, str]]:
    status = os.fstat(raw.fileno())
    known = stat.S_ISREG(status.st_mode) and status.st_size > 0
    count = characters = 0
    for each in lines:
        if known and (count % _LINES == 0 or characters >= _CHARACTERS):
            progress(min(1.0, raw.tell() / status.st_size))
            characters = 0
        count, characters = count + 1, characters + len(each[1])
        yield each


def _read(path: str, lines: Iterable[tuple[int, str]], reading: ReadOptions) -> TraceFile:
    parser: _Parser | None = None
    cut = 0
    for number, line in lines:
        if parser is None:
            known = _form_of(line) if reading.form == AUTO else reading.form
            if known is None and len(line) >= _MOST_LINE:
                raise _unknown(path, f"a line of {len(line):,} characters and more, and before it")
            if known is None:
                continue
            parser = _parser(known, reading)
        try:
            parser.add(line)
        except LineError as error:
            if error.is_cut and not line.endswith("\n"):
                cut = 1  # the writer of the file was stopped in the middle of the line
                break
            raise TraceError(f"line {number} of {path!r}: {error}") from None
    if parser is None:
        raise _unknown(path)
    found = parser.finish(path)
    if not cut:
        return found
    skipped: Mapping[str, int] = {**found.trace.skipped, CUT: cut}
    return replace(found, trace=replace(found.trace, skipped=skipped))


def _unknown(path: str, beside: str = "") -> TraceError:
    """The error of a file that is no trace, with what else there is to say of it."""
    return TraceError(
        f"{path!r} from TRACE on the command line has {beside and beside + ' '}no line of a known "
        f"trace; allowed: JSONL with hash_ids or prompt_token_ids, a recording of FlexKV, or a log "
        f"with token ids ({', '.join(FORMS[1:])}): {_logging(request_logs.VLLM)}; "
        f"{_logging(request_logs.SGLANG)}"
    )


def _logging(form: str) -> str:
    name = {request_logs.VLLM: "vLLM", request_logs.SGLANG: "SGLang"}[form]
    return f"{name} logs ids with {request_logs.FLAGS[form]}"


def _form_of(line: str) -> str | None:
    if line.startswith("{"):
        try:
            content, _ = json.JSONDecoder().raw_decode(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(content, dict):
            return None
        if recording.recognises(content):
            return recording.FORM
        if sessions.recognises(content):
            return sessions.FORM
        form = hashed.form_of(content)
        if form is not None:
            return form
    return request_logs.form_of(line)


def _parser(form: str, reading: ReadOptions) -> _Parser:
    if form in (recording.FORM, sessions.FORM) and reading.block_tokens is not None:
        raise TraceError(
            f"{reading.block_tokens} from --block-tokens cannot be used with the format {form}, "
            "which names the size of its blocks; allowed: no --block-tokens"
        )
    if form not in _TIMED and reading.unit != clock.AUTO:
        raise TraceError(
            f"{reading.unit!r} from --time-unit cannot be used with the format {form}, whose times "
            "have a known unit; allowed: no --time-unit"
        )
    if form == recording.FORM:
        return _Recording()
    if form in (hashed.MOONCAKE, hashed.BAILIAN, sessions.FORM):
        return _Hashed(form, reading)
    return _Log(form, reading)


class _Recording:
    def __init__(self) -> None:
        self._parser = recording.Parser()

    def add(self, line: str) -> None:
        self._parser.add(json_object(line))

    def finish(self, name: str) -> TraceFile:
        return TraceFile(self._parser.trace(name), self._parser.measured)


class _Hashed:
    def __init__(self, form: str, reading: ReadOptions) -> None:
        self._starts = Starts(reading.sessions_per_hour)
        self._parser = (
            sessions.SessionParser(reading.unit, self._starts)
            if form == sessions.FORM
            else hashed.Parser(form, reading.block_tokens, reading.unit, self._starts)
        )

    def add(self, line: str) -> None:
        # Files of one object each may have been joined without a line end between them.
        for content in json_objects(line):
            self._parser.add(content)

    def finish(self, name: str) -> TraceFile:
        return TraceFile(self._parser.trace(name), made_starts=self._starts.count)


class _Log:
    def __init__(self, form: str, reading: ReadOptions) -> None:
        tokens = reading.block_tokens or _LOG_BLOCK_TOKENS
        self._parser = request_logs.Parser(form, tokens, reading.unit)

    def add(self, line: str) -> None:
        self._parser.add(line)

    def finish(self, name: str) -> TraceFile:
        return TraceFile(self._parser.trace(name))
