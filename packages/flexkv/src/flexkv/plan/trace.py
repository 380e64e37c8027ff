# SPDX-License-Identifier: Apache-2.0
"""A trace in memory: requests, and the blocks of their prompts as small numbers."""

from __future__ import annotations

import resource
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flexkv.system.available import available_memory
from flexkv.types.errors import TraceError
from flexkv.types.texts import size

_STATM = Path("/proc/self/statm")
_CHECKED_BLOCKS = 1 << 16
"""Blocks between two looks at the memory that they take: 15 MB at most."""

NO_BLOCK = -1
"""In place of the block before the first one of a prompt."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace."""

    seconds: float
    """Time of its arrival."""
    blocks: Sequence[int]
    """Numbers of the prompt's complete blocks, first block first."""
    answer: Sequence[int]
    """Numbers of the complete blocks behind them, which the answer filled; empty if unknown."""
    prompt_tokens: int
    output_tokens: int
    session: str = ""
    """Name of its conversation; empty if unknown."""

    @property
    def chain(self) -> list[int]:
        """Numbers of all its complete blocks."""
        return [*self.blocks, *self.answer]


@dataclass(slots=True)
class Trace:
    """The requests of a trace, in the order of their arrival."""

    name: str
    form: str
    """Format of the file, as in `--format`."""
    block_tokens: int
    requests: list[TracedRequest]
    distinct_blocks: int
    block_bytes: int | None = None
    """Over all ranks; None if unknown."""
    prefill: tuple[float, float] | None = None
    """Seconds to compute a token and a pair of tokens, as the recording engine measured them."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """The number of requests that are left out, by reason."""

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last."""
        return self.requests[-1].seconds - self.requests[0].seconds if self.requests else 0.0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def blocks(self) -> int:
        """The number of complete blocks of all prompts."""
        return sum(len(request.blocks) for request in self.requests)

    @property
    def lengths(self) -> list[int]:
        """The number of complete blocks of each request, with its answer."""
        return [len(request.blocks) + len(request.answer) for request in self.requests]

    @property
    def uses(self) -> int:
        """The number of complete blocks of all prompts and answers."""
        return sum(self.lengths)


class Room:
    """Half of the memory that is available when the room is made. The rest is for other processes,
    and for what is computed from the trace."""

    def __init__(self) -> None:
        self._most = available_memory() // 2
        self._before = _resident()

    def check(self) -> None:
        """Raise TraceError if more memory was taken since."""
        if _resident() - self._before > self._most:
            raise TraceError(
                f"TRACE on the command line takes more than {size(self._most)} of memory, half of "
                "what is available; allowed: a part of the trace, such as its first lines"
            )


def _resident() -> int:
    return int(_STATM.read_text(encoding="ascii").split()[1]) * resource.getpagesize()


@dataclass(slots=True)
class Prefixes:
    """Numbers blocks so that equal numbers mean equal prefixes.

    Two blocks have the same number if they have the same name behind the same block. Names need
    therefore differ only among blocks behind the same prefix.
    """

    _numbers: dict[tuple[int, Hashable], int] = field(default_factory=dict)
    _room: Room = field(default_factory=Room)
    _unchecked: int = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def follow(self, names: Iterable[Hashable], after: int = NO_BLOCK) -> list[int]:
        """The numbers of consecutive blocks with these names, the first of them behind the block
        `after`. Raises TraceError if all blocks together take too much memory."""
        numbers = self._numbers
        found = []
        for name in names:
            after = numbers.setdefault((after, name), len(numbers))
            found.append(after)
        self._unchecked += len(found)
        if self._unchecked >= _CHECKED_BLOCKS:
            self._unchecked = 0
            self._room.check()
        return found
