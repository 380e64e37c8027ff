# SPDX-License-Identifier: Apache-2.0
"""What the two runs say when they are laid side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from integration.demo.conversation import Turn


@dataclass(frozen=True, slots=True)
class Pair:
    """The same turn in both runs."""

    without: Turn
    with_flexkv: Turn

    @property
    def identical(self) -> bool:
        """Whether both answers have the same token ids."""
        return self.without.tokens == self.with_flexkv.tokens

    @property
    def speedup(self) -> float:
        """How many times sooner the first token came with FlexKV."""
        return self.without.ttft / self.with_flexkv.ttft

    @property
    def returning(self) -> bool:
        """Whether the user had been there before."""
        return self.without.number > 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """The summary of a demo.

    Times in seconds. `first` are the turns in which the users come for the first time, `returning`
    all others; medians over them. `loaded_tokens` counts what FlexKV brought back for the engine,
    by vLLM's own counter.
    """

    turns: int
    compared_tokens: int
    different: list[tuple[int, str]]
    first_without: float
    first_with: float
    returning_without: float
    returning_with: float
    total_without: float
    total_with: float
    loaded_tokens: int

    @property
    def speedup(self) -> float:
        """How many times sooner a returning user sees the first token."""
        return self.returning_without / self.returning_with

    @property
    def passed(self) -> bool:
        """Whether all answers are identical and FlexKV had a part in them."""
        return not self.different and self.loaded_tokens > 0


def judge(pairs: Sequence[Pair], loaded_tokens: int) -> Verdict:
    """Summarise a finished demo of at least two turns a user."""
    first = [pair for pair in pairs if not pair.returning]
    returning = [pair for pair in pairs if pair.returning]
    return Verdict(
        turns=len(pairs),
        compared_tokens=sum(len(pair.without.tokens) for pair in pairs),
        different=[
            (pair.without.number, pair.without.user) for pair in pairs if not pair.identical
        ],
        first_without=median(pair.without.ttft for pair in first),
        first_with=median(pair.with_flexkv.ttft for pair in first),
        returning_without=median(pair.without.ttft for pair in returning),
        returning_with=median(pair.with_flexkv.ttft for pair in returning),
        total_without=sum(pair.without.seconds for pair in pairs),
        total_with=sum(pair.with_flexkv.seconds for pair in pairs),
        loaded_tokens=loaded_tokens,
    )
