# SPDX-License-Identifier: Apache-2.0
"""FlexKV's health as samples, and out of samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flexkv.figures.definitions import HEALTH, Samples, sample
from flexkv.types.changes import BELOW
from flexkv.types.troubles import HealthState, Problem, Trouble

_OK = sample(HEALTH.name, HealthState.OK, "", "")


def _name(problem: Problem) -> str:
    return sample(HEALTH.name, problem.trouble.state, problem.trouble, problem.tier)


_PROBLEMS = {
    _name(each): each
    for trouble in sorted(Trouble, key=lambda each: each.state is not HealthState.OFF)
    for each in (
        [Problem(trouble, medium.value) for medium in BELOW]
        if trouble.of_tier
        else [Problem(trouble)]
    )
}
"""All problems by name of the sample, the worst first."""


def problems_of(samples: Mapping[str, float]) -> list[Problem]:
    """The problems that samples show, the worst first."""
    return [problem for name, problem in _PROBLEMS.items() if samples.get(name)]


def state_of(problems: Iterable[Problem]) -> HealthState:
    """The state of a cache with these problems."""
    order = list(HealthState)
    states = (each.trouble.state for each in problems)
    return max(states, key=order.index, default=HealthState.OK)


def health_text(problems: Iterable[Problem]) -> str:
    """One line for people: `ok`, or the state and all problems."""
    listed = list(problems)
    texts = "; ".join(each.text for each in listed)
    return f"{state_of(listed)}: {texts}" if listed else HealthState.OK.value


def ok_sample(samples: Mapping[str, float]) -> Samples:
    """The value of the state `ok`, which follows from all other values of `HEALTH`."""
    return {_OK: int(not problems_of(samples))}


def trouble_samples(trouble: Trouble) -> Samples:
    """The values of an engine that has this trouble as a whole, whatever its cache says."""
    others = dict.fromkeys((name for name, each in _PROBLEMS.items() if not each.tier), 0.0)
    return others | {_name(Problem(trouble)): 1, _OK: 0}
