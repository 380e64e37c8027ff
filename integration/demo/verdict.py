# SPDX-License-Identifier: Apache-2.0
"""What the runs say when they are laid side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from integration.demo.conversation import Turn


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompt without FlexKV and with it."""

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
class Results:
    """What was measured.

    Attributes:
        pairs: all turns of the engine alone and with FlexKV.
        loaded_tokens: that FlexKV brought back for the engine, by its own count.
        restarts: the last turns of the engine alone, and the same prompts after the engine with
            FlexKV was killed and started again; empty if it was not.
        restored_tokens: that FlexKV brought back for that engine.
        example: all turns of vLLM with its ExampleConnector; empty if it did not run.
    """

    pairs: list[Pair]
    loaded_tokens: int
    restarts: list[Pair] = field(default_factory=list)
    restored_tokens: int = 0
    example: list[Turn] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds to the first token in several turns: the median, the least and the most."""

    middle: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} s ({self.least:.2f} to {self.most:.2f})"


def spread(turns: Sequence[Turn]) -> Spread:
    """Of at least one turn."""
    times = [turn.ttft for turn in turns]
    return Spread(median(times), min(times), max(times))


FAIR_SHARE = 0.1
"""Other processes may take this share of the cores in each run. Not tuned."""


def others_share(turns: Sequence[Turn]) -> float:
    """The share of the cores that other processes took in at least one turn, over their time."""
    return sum(turn.others * turn.seconds for turn in turns) / sum(turn.seconds for turn in turns)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The summary of a demo.

    Times in seconds. `first` are the turns in which the users come for the first time, `returning`
    all others. `restarted` are the turns after the restart, `restarted_without` the same prompts
    without FlexKV. `different` names the turns whose answers are not equal. `others` has the share
    of the cores that other processes took in each run, by the name of the run.
    """

    turns: int
    compared_tokens: int
    different: list[str]
    first_without: Spread
    first_with: Spread
    returning_without: Spread
    returning_with: Spread
    total_without: float
    total_with: float
    loaded_tokens: int
    restarted_without: Spread | None
    restarted_with: Spread | None
    restored_tokens: int
    returning_example: Spread | None
    others: dict[str, float]

    @property
    def is_fair(self) -> bool:
        """Whether other processes left the machine to the engine in all runs."""
        return all(share <= FAIR_SHARE for share in self.others.values())

    @property
    def speedup(self) -> float:
        """How many times sooner a returning user sees the first token."""
        return self.returning_without.middle / self.returning_with.middle

    @property
    def passed(self) -> bool:
        """Whether all answers are identical and FlexKV had a part in them, after the restart too if
        there was one."""
        restored = self.restarted_with is None or self.restored_tokens > 0
        return not self.different and self.loaded_tokens > 0 and restored


def judge(results: Results) -> Verdict:
    """Summarise a finished demo of at least two turns a user."""
    pairs, restarts = results.pairs, results.restarts
    first = [pair for pair in pairs if not pair.returning]
    returning = [pair for pair in pairs if pair.returning]
    different = [
        f"turn {pair.without.number} of {pair.without.user}" for pair in pairs if not pair.identical
    ]
    different += [
        f"{pair.without.user} after the restart" for pair in restarts if not pair.identical
    ]
    example = [turn for turn in results.example if turn.number > 1]
    runs = {
        "without FlexKV": [pair.without for pair in pairs],
        "with FlexKV": [pair.with_flexkv for pair in pairs],
        "after the restart": [pair.with_flexkv for pair in restarts],
    }
    return Verdict(
        turns=len(pairs) + len(restarts),
        compared_tokens=sum(len(pair.without.tokens) for pair in (*pairs, *restarts)),
        different=different,
        first_without=spread([pair.without for pair in first]),
        first_with=spread([pair.with_flexkv for pair in first]),
        returning_without=spread([pair.without for pair in returning]),
        returning_with=spread([pair.with_flexkv for pair in returning]),
        total_without=sum(pair.without.seconds for pair in pairs),
        total_with=sum(pair.with_flexkv.seconds for pair in pairs),
        loaded_tokens=results.loaded_tokens,
        restarted_without=spread([pair.without for pair in restarts]) if restarts else None,
        restarted_with=spread([pair.with_flexkv for pair in restarts]) if restarts else None,
        restored_tokens=results.restored_tokens,
        returning_example=spread(example) if example else None,
        others={name: others_share(turns) for name, turns in runs.items() if turns},
    )
