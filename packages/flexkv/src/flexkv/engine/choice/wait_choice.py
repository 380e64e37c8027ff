# SPDX-License-Identifier: Apache-2.0
"""Decides whether a request waits for lower tiers, by measured times of computing and of each
tier."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flexkv.client import FetchId, FetchState
from flexkv.engine.choice.cost import LinkPace, PrefillPace, Span
from flexkv.types.changes import Medium

PROBE_SHARE = 0.03
"""Share of the computing time that one measurement of a link, by a load or a wait, may cost.
Together with other losses it is less than 5 %, the most that a hit may cost beyond computing."""

_PROBE_SECONDS = 0.02
"""Seconds that one measurement may cost in any case. A read of an NVMe drive takes 0.1 to 1 ms. A
step of the engine without work, after which the drive is polled again, takes about as long; on a
busy machine both take several times that. Not tuned."""

_AS_SLOW = 2
"""A request waits for blocks that another engine computes, as long as that engine seems to take at
most this many times as long for the rest as its own would. Not tuned."""

_LATE = 2
"""A tier is expected to be as fast as its fastest recent read. If it delivers nothing in this many
times that time, it counts as slower. Not tuned."""

SLACK_SECONDS = 0.005
"""A load expected to take less is always made, however short computing is. In seconds: about one
step of an engine, the resolution of both measurements. Not tuned."""


@dataclass(slots=True)
class _Wait:
    """A fetch that a request may wait for.

    Attributes:
        since: when the first question about this fetch was asked; time.monotonic().
        announced: see `WaitChooser.is_worth_waiting`.
        ahead: number of blocks that other requests waited for at the first question about this
            fetch, by tier.
        refused: whether the latest answer was not to wait.
        slowest: the tier whose expected time decided the latest answer; None if no tier's did.
    """

    since: float
    announced: bool
    ahead: Mapping[Medium, int] = field(default_factory=dict)
    refused: bool = False
    slowest: Medium | None = None


class WaitChooser:
    """Decides for each fetch whether its request waits. Tiers read at the same time, each at its
    own pace, so the slowest tier decides.

    No pace decides for ever: if it has prevented waits for a while, a short wait measures it again.

    Args:
        prefill: the measured pace of computing; shared with the caller, who updates it.
        block_bytes: bytes of a FlexKV block over all ranks.
        state_of: returns the state of a fetch; see `CacheClient.fetch_state`.
    """

    def __init__(
        self,
        prefill: PrefillPace,
        block_bytes: int,
        state_of: Callable[[FetchId], FetchState],
    ) -> None:
        self._prefill = prefill
        self._block_bytes = block_bytes
        self._state_of = state_of
        self._paces = {medium: LinkPace() for medium in Medium}
        self._waits: dict[FetchId, _Wait] = {}

    def ended(self, fetch: FetchId, state: FetchState) -> None:
        """Take over what an ended fetch has measured, and forget the fetch. Call it once for each
        fetch.

        Args:
            fetch: the fetch.
            state: its last state.
        """
        wait = self._waits.pop(fetch, None) or _Wait(state.begun, False)
        for medium, (count, last) in state.gave.items():
            # The tier has read the blocks ahead meanwhile.
            blocks = count + wait.ahead.get(medium, 0)
            self._paces[medium].observe(blocks * self._block_bytes, last - state.begun)
        if state.gave or (wait.announced and state.queried is not None):
            return  # a store is not slow because another engine is
        waited = time.monotonic() - state.begun
        silent = state.next_medium or self._slowest(state, wait)[0]
        if silent is not None and not state.done and waited > self._latest(state, wait):
            self._paces[silent].contradict(self._block_bytes, waited)
        if wait.refused and wait.slowest is not None:
            pace = self._paces[wait.slowest]
            if pace.doubtful and waited >= _PROBE_SECONDS:
                pace.give_up()
            else:
                pace.refuse()

    def is_worth_waiting(
        self, fetch: FetchId, span: Span, announced: bool = False, whole: bool = False
    ) -> bool:
        """Whether to wait for the rest of a fetch that has not ended, rather than to compute it.

        Until computing is measured, the answer is to wait. A tier whose pace is unknown or in doubt
        gets a short wait, which measures it.

        Args:
            fetch: the fetch. Its request is asked about again with each step.
            span: the tokens of all blocks of the fetch.
            announced: whether another engine is said to write blocks of it to a shared store.
            whole: whether the span ends with the blocks for which host memory has no room yet.
        """
        wait = self._waits.get(fetch)
        if wait is None:
            ahead: Counter[Medium] = Counter()
            for each in self._waits:
                ahead.update(self._state_of(each).missing)
            wait = self._waits[fetch] = _Wait(time.monotonic(), announced, ahead)
        state = self._state_of(fetch)
        if whole and state.stop:  # else it waits for room
            state = state.unbounded
        wait.refused = not self._is_worth_waiting(state, span, wait)
        return not wait.refused

    def _is_worth_waiting(self, state: FetchState, span: Span, wait: _Wait) -> bool:
        first_missing = span.start + span.tokens * state.arrived // max(1, state.stop)
        gain = self._prefill.seconds(Span(first_missing, span.stop))
        whole = self._prefill.seconds(span)
        if gain is None or whole is None:
            return True
        waited = time.monotonic() - state.begun
        begun = state.arrived > state.first
        awaits_store = wait.announced and state.queried is not None
        if awaits_store or not state.missing:
            # An engine computes or stores them. To compute them takes another one as long, and it
            # computes other prompts meanwhile.
            waited = time.monotonic() - wait.since if awaits_store else waited
            enough = max(gain, SLACK_SECONDS)
            return waited < enough or (begun and state.seconds_left < _AS_SLOW * enough)
        wait.slowest, rest = self._slowest(state, wait, silent=begun)
        if begun:
            # What this fetch has measured says more of the tiers that have given blocks.
            rest = max(state.seconds_left, rest or 0.0)
        elif rest is not None and waited > self._latest(state, wait):
            return False
        if rest is not None and rest < max(gain, SLACK_SECONDS):
            return True
        pace = None if wait.slowest is None else self._paces[wait.slowest]
        if rest is not None and not (pace is not None and pace.doubtful):
            return False
        patience = 1 if pace is None else pace.patience
        return waited < max(_PROBE_SECONDS, PROBE_SHARE * whole) * patience

    def _slowest(
        self, state: FetchState, wait: _Wait, *, silent: bool = False
    ) -> tuple[Medium | None, float | None]:
        """The tier that is expected to give its last block last, and in how many seconds; None
        before the first measurement of a tier that is to give blocks. With `silent`, only of tiers
        that have given nothing yet."""
        slowest, longest = None, 0.0
        for medium, count in state.missing.items():
            if silent and medium in state.gave:
                continue
            blocks = count + wait.ahead.get(medium, 0)
            seconds = self._paces[medium].seconds(blocks * self._block_bytes)
            if seconds is None:
                return medium, None
            if slowest is None or seconds > longest:
                slowest, longest = medium, seconds
        return slowest, longest if slowest is not None else None

    def _latest(self, state: FetchState, wait: _Wait) -> float:
        """Seconds from the beginning of a fetch by which it should have delivered its first block,
        after the blocks that other requests waited for before."""
        _, seconds = self._slowest(state, wait)
        return _LATE * (seconds or 0.0) + _PROBE_SECONDS
