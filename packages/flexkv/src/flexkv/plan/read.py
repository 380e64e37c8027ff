# SPDX-License-Identifier: Apache-2.0
"""Reads a trace file of any known format."""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from typing import IO

from flexkv.plan import mooncake, recording, request_logs
from flexkv.plan.fields import LineError, json_object
from flexkv.plan.trace import Trace
from flexkv.types.errors import TraceError

AUTO = "auto"
FORMS = (
    AUTO,
    recording.FORM,
    mooncake.FORM,
    request_logs.VLLM,
    request_logs.SGLANG,
    request_logs.TOKENS,
)

_MOST_LINE = 1 << 28
"""The most characters of a line. A prompt of a million tokens takes about 8 MB."""
_LOG_BLOCK_TOKENS = 16
"""Tokens of a block of a log, if the user names no other number: the engines' default."""
_GZIP = b"\x1f\x8b"


class TraceFile:
    """A trace that was read.

    Attributes:
        trace: the requests, at least one, with at least one complete block.
        measured: the hits that the engine counted; None if the file does not have them.
    """

    def __init__(self, trace: Trace, measured: recording.Measured | None) -> None:
        self.trace = trace
        self.measured = measured


def read_trace(path: str, form: str = AUTO, block_tokens: int | None = None) -> TraceFile:
    """Read the file at `path`, which may be compressed by gzip.

    Args:
        path: path of a regular file.
        form: one of `FORMS`.
        block_tokens: tokens of a block; None for the number in the file, or 16.

    Raises:
        TraceError: the file cannot be read, or is no trace of that format.
    """
    try:
        with _open(path) as file:
            found = _read(path, file, form, block_tokens)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(
            f"cannot read {path!r} from TRACE on the command line: {reason}; allowed: a text file, "
            "or one that gzip made of it"
        ) from None
    if not found.trace.blocks:
        raise TraceError(
            f"{path!r} from TRACE on the command line has no prompt with a complete block of "
            f"{found.trace.block_tokens} tokens"
            + (f", and {found.trace.skipped} requests without ids" if found.trace.skipped else "")
            + "; allowed: a trace with longer prompts, whose ids the log has not shortened"
        )
    return found


def _open(path: str) -> IO[str]:
    """Open a regular file. Refuses other kinds, because opening a FIFO would wait for a writer."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    raw = open(fd, "rb")  # noqa: SIM115  (closed with the text over it)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(0, "not a regular file")
        packed = raw.peek(2)[:2] == _GZIP
        data: IO[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
        return io.TextIOWrapper(data, encoding="utf-8")
    except BaseException:
        raw.close()
        raise


def _lines(file: IO[str]) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers."""
    number = 0
    while line := file.readline(_MOST_LINE):
        number += 1
        if line.strip():
            yield number, line


def _read(path: str, file: IO[str], form: str, block_tokens: int | None) -> TraceFile:
    add: Callable[[str], None] | None = None
    finish: Callable[[], TraceFile] | None = None
    for number, line in _lines(file):
        if add is None or finish is None:
            known = _form_of(line) if form == AUTO else form
            if known is None:
                continue
            add, finish = _parser(path, known, block_tokens)
        try:
            add(line)
        except LineError as error:
            if error.is_cut and not line.endswith("\n"):
                break  # the writer of the file was stopped in the middle of the line
            raise TraceError(f"line {number} of {path!r}: {error}") from None
    if finish is None:
        raise TraceError(
            f"{path!r} from TRACE on the command line has no line of a known trace; allowed: "
            f"Mooncake's JSONL, a log of vLLM or SGLang with token ids, or a recording of FlexKV "
            f"({', '.join(FORMS[1:])})"
        )
    return finish()


def _form_of(line: str) -> str | None:
    if line.startswith("{"):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(content, dict):
            return None
        if recording.recognises(content):
            return recording.FORM
        if mooncake.recognises(content):
            return mooncake.FORM
    return request_logs.form_of(line)


def _parser(
    path: str, form: str, block_tokens: int | None
) -> tuple[Callable[[str], None], Callable[[], TraceFile]]:
    """The functions that read a line of such a file and that return the trace at its end."""
    if form == recording.FORM:
        if block_tokens is not None:
            raise TraceError(
                f"{block_tokens} from --block-tokens cannot be used with a recording of FlexKV, "
                "which names the size of its blocks; allowed: no --block-tokens"
            )
        recorded = recording.Parser()
        return (
            lambda line: recorded.add(json_object(line)),
            lambda: TraceFile(recorded.trace(path), recorded.measured),
        )
    if form == mooncake.FORM:
        rows = mooncake.Parser(block_tokens)
        return (
            lambda line: rows.add(json_object(line)),
            lambda: TraceFile(rows.trace(path), None),
        )
    log = request_logs.Parser(form, block_tokens or _LOG_BLOCK_TOKENS)
    return log.add, lambda: TraceFile(log.trace(path), None)
