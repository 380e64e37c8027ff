# SPDX-License-Identifier: Apache-2.0
"""Traces that engines with FlexKV have recorded; see `flexkv.engine.recorder` for the format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexkv.engine.recorder import (
    BLOCKS,
    ENGINE_HIT,
    HEAD,
    HIT,
    NAME_DIGITS,
    OUTPUT,
    PREFILL,
    PROMPT,
    SESSION,
    TIME,
    VERSION,
)
from flexkv.plan.fields import LineError, natural, number, show
from flexkv.plan.trace import NO_BLOCK, Prefixes, Trace, TracedRequest

FORM = "flexkv"


@dataclass(frozen=True, slots=True)
class Measured:
    """The prompt tokens of a recording: all, those that the engine's own cache hit, and those that
    FlexKV loaded."""

    prompt_tokens: int
    engine_tokens: int
    hit_tokens: int


def recognises(line: Mapping[str, object]) -> bool:
    """Whether a line of a trace looks like this format."""
    return HEAD in line


class RecordingParser:
    """Reads the lines of one recording."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, int, int, str, int, str]] = []
        self._heads = 0
        self._began = 0.0
        self._block_tokens = self._block_bytes = 0
        self._prefill: tuple[float, float] | None = None
        self._engine_tokens = self._hit_tokens = 0

    def add(self, line: Mapping[str, object]) -> None:
        """Read one line. Raises LineError if the line violates the format."""
        if HEAD in line:
            self._begin(line)
        elif not self._heads:
            raise LineError("the first line", "no head", f"an object with {HEAD!r}")
        elif PREFILL in line:
            self._prefill = _pair(line[PREFILL])
        else:
            self._add(line)

    def trace(self, name: str) -> Trace:
        """Make a trace of all lines so far."""
        prefixes, requests = Prefixes(), []
        size = self._block_tokens
        for seconds, prompt, output, blocks, head, session in sorted(
            self._rows, key=lambda row: row[0]
        ):
            names = [blocks[i : i + NAME_DIGITS] for i in range(0, len(blocks), NAME_DIGITS)]
            chain = prefixes.follow(names, NO_BLOCK - head)
            complete = prompt // size
            requests.append(
                TracedRequest(seconds, chain[:complete], chain[complete:], prompt, output, session)
            )
        return Trace(
            name, FORM, size, requests, len(prefixes), self._block_bytes or None, self._prefill
        )

    @property
    def measured(self) -> Measured:
        """The hits that the engine counted."""
        prompts = sum(row[1] for row in self._rows)
        return Measured(prompts, self._engine_tokens, self._hit_tokens)

    def _begin(self, line: Mapping[str, object]) -> None:
        if line[HEAD] != VERSION:
            raise LineError(
                HEAD, show(line[HEAD]), f"{VERSION}, the version that this FlexKV reads"
            )
        tokens = natural(line, "block_tokens", least=1)
        size = natural(line, "block_bytes")
        if self._heads and (tokens, size) != (self._block_tokens, self._block_bytes):
            raise LineError(
                "the head",
                f"of blocks of {tokens} tokens and {size} bytes",
                f"as before: {self._block_tokens} tokens and {self._block_bytes} bytes; record "
                "each model to a file of its own",
            )
        self._block_tokens, self._block_bytes = tokens, size
        self._began = number(line, "began")
        self._heads += 1

    def _add(self, line: Mapping[str, object]) -> None:
        blocks = line.get(BLOCKS)
        if not isinstance(blocks, str) or len(blocks) % NAME_DIGITS:
            raise LineError(BLOCKS, show(blocks), f"a text of {NAME_DIGITS} digits a block")
        prompt, output = natural(line, PROMPT, least=1), natural(line, OUTPUT)
        if len(blocks) // NAME_DIGITS > (prompt + output) // self._block_tokens:
            raise LineError(
                BLOCKS,
                f"{len(blocks) // NAME_DIGITS} names for {prompt + output} tokens",
                f"one for each complete block of {self._block_tokens} tokens",
            )
        session = line.get(SESSION, "")
        if not isinstance(session, str):
            raise LineError(SESSION, show(session), "a text")
        self._engine_tokens += natural(line, ENGINE_HIT)
        self._hit_tokens += natural(line, HIT)
        seconds = self._began + number(line, TIME)
        self._rows.append((seconds, prompt, output, blocks, self._heads, session))


def _pair(value: object) -> tuple[float, float]:
    if isinstance(value, list) and len(value) == 2:
        fields = {"token": value[0], "pair": value[1]}
        return number(fields, "token"), number(fields, "pair")
    raise LineError(PREFILL, show(value), "a list of two numbers")
