# SPDX-License-Identifier: Apache-2.0
"""Decides whether and how to load a hit, and whether to wait for one, by measured times."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flexkv.client import FetchId, FetchState
from flexkv.engine.choice.cost import LinkPace, PrefillPace, Span, StepTimer
from flexkv.types.changes import Medium

PROBE_SHARE = 0.03
"""Share of the computing time that one measurement of a link, by a load or a wait, may cost.
Together with other losses it is less than 5 %, the most that a hit may cost beyond computing."""

_PROBE_SECONDS = 0.02
"""Seconds that one measurement may cost in any case. A read of an NVMe drive takes 0.1 to 1 ms. A
step of the engine without work, after which the drive is polled again, takes about as long; on a
busy machine both take several times that."""

_AS_SLOW = 2
"""A request waits for blocks that another engine computes, as long as that engine seems to take at
most this many times as long for the rest as its own would."""

_LATE = 2
"""A tier is expected to be as fast as its fastest recent read. If it delivers nothing in this many
times that time, it counts as slower."""

SLACK_SECONDS = 0.005
"""A load expected to take less is always made, however short computing is. In seconds: about one
step of an engine, the resolution of both measurements."""


@dataclass(slots=True)
class _Wait:
    """A fetch that a request may wait for. At `since`, by time.monotonic(), was the first question
    about it; `ahead` blocks were awaited by other requests then. `slowest` is the tier whose
    expected time decided the latest answer, if one did."""

    since: float
    announced: bool
    ahead: Mapping[Medium, int] = field(default_factory=dict)
    refused: bool = False
    slowest: Medium | None = None


class WaitChooser:
    """Decides for each fetch whether its request waits. Tiers read at the same time, each at its
    own pace, so the slowest tier decides.

    No pace decides for ever: if it has prevented waits for a while, a short wait measures it again.
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
        fetch."""
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
        self,
        fetch: FetchId,
        span: Span,
        announced: bool = False,
        whole: bool = False,
        state: FetchState | None = None,
    ) -> bool:
        """See `LoadChooser.is_worth_waiting`. Until computing is measured, the answer is to wait. A
        tier whose pace is unknown or in doubt gets a short wait, which measures it."""
        wait = self._waits.get(fetch)
        if wait is None:
            ahead: Counter[Medium] = Counter()
            for each in self._waits:
                ahead.update(self._state_of(each).missing)
            wait = self._waits[fetch] = _Wait(time.monotonic(), announced, ahead)
        state = state or self._state_of(fetch)
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


_MOST_DELAY_SECONDS = 0.25
"""A delay of a load up to this is accepted: hardly anyone notices it, and the load spares the
engine the time to compute."""

_CONTENTION = 0.15
"""Share of its time that a load takes longer beside a forward pass on the same cores. Tuned on two
cores with `nox -s bench -- --only load-modes`. Layer by layer, the time to first token of 82 MiB
was 9 to 21 ms longer than before the forward pass; that of 32 MiB was 5 ms shorter, because the
saved step weighs more."""


class LoadMode(enum.Enum):
    """The setting `load_mode`."""

    ASYNC = "async"
    LAYERWISE = "layerwise"
    AUTO = "auto"


class Left(enum.Enum):
    """Why a hit or a part of it is not loaded. The values are labels of the metric."""

    SHORT = "short"
    """The hit has fewer tokens than the setting `min_load_tokens`."""
    SLOW = "slow"
    """Loading from host memory is expected to take longer than computing."""
    AWAITED = "awaited"
    """Waiting for a lower tier is expected to take longer than computing."""
    DELAYED = "delayed"
    """The steps before the loaded request computes are expected to take longer than computing it
    delays all requests."""


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """How many blocks of a hit to load, from the first on."""

    blocks: int
    left: Left | None = None


class LoadChooser:
    """Decides about the load of each request.

    No estimate decides for ever: if a rate has prevented loads for a while, a small load or a short
    wait measures it again.

    Args:
        mode: the setting in force; LAYERWISE and AUTO only where the engine can do it.
        on_cores: whether the cores that copy also compute.
        loading: returns how many blocks are being loaded; who orders all loads may replace it.
        steps_behind: steps of the engine that pass between the order of an asynchronous load and
            the step that computes the request. The owner sets the attribute where it varies.
    """

    def __init__(
        self,
        mode: LoadMode,
        min_tokens: int,
        always: bool,
        block_bytes: int,
        ranks: int,
        *,
        on_cores: bool,
        loading: Callable[[], int],
        state_of: Callable[[FetchId], FetchState],
        steps_behind: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mode = mode
        self._min_tokens = min_tokens
        self._always = always
        self._block_bytes = block_bytes
        self._ranks = ranks
        self._on_cores = on_cores
        self.loading_now = loading
        self._state_of = state_of
        self.steps_behind = steps_behind if mode is LoadMode.ASYNC else 0
        self._prefill = PrefillPace()
        self._device = LinkPace()
        self.timer = StepTimer(self._prefill, clock)
        self._waits = WaitChooser(self._prefill, block_bytes, state_of)

    @property
    def prefill_cost(self) -> tuple[float, float] | None:
        """Seconds of a token, and of a pair of tokens; None before the first measurement."""
        return self._prefill.cost

    def step_begins(self, spans: Sequence[Span]) -> int:
        """Note that a step begins which computes `spans` of prompts. Returns the number for its
        report, or 0 if no report is needed."""
        return self.timer.begins(spans) if spans else 0

    def loaded(self, rate: float) -> None:
        """Take the rate of a rank's load, in bytes per second; 0 if the rank has loaded nothing."""
        self._device.observe(rate, 1.0)

    def left(self, reason: Left) -> None:
        """Note that the engine computes a hit, or a part of it, because this object decided so."""
        if reason is Left.SLOW:
            self._device.refuse()

    def fetched(self, fetch: FetchId, state: FetchState) -> None:
        """See `WaitChooser.ended`."""
        self._waits.ended(fetch, state)

    def choose_load(
        self, span: Span, blocks: int, *, whole: bool = False, others: int = 0
    ) -> LoadChoice:
        """Choose how many blocks of a hit in host memory to load, from the first on; with `whole`,
        all or none, since a part is of no use. The engine has `others` further requests."""
        if span.stop - span.start < self._min_tokens:
            return LoadChoice(0, Left.SHORT)
        loading = self._loading(blocks + self.loading_now())
        computing = self._prefill.seconds(span)
        if self._always or loading is None or computing is None:
            return LoadChoice(blocks)
        if loading <= max(computing, SLACK_SECONDS):
            delayed = others > 0 and self._is_delayed(computing, others)
            return LoadChoice(0, Left.DELAYED) if delayed else LoadChoice(blocks)
        if not self._device.doubtful:
            return LoadChoice(0, Left.SLOW)
        return self._probe(blocks, computing / loading, whole)

    def is_worth_waiting(
        self,
        fetch: FetchId,
        span: Span,
        others: int = 0,
        *,
        announced: bool = False,
        whole: bool = False,
        state: FetchState | None = None,
    ) -> bool:
        """Whether to wait for the rest of a fetch that has not ended, rather than to compute it.

        Args:
            announced: whether another engine is said to write blocks of it to a shared store.
            whole: whether the span ends with the blocks for which host memory has no room yet. Each
                part for which it has room is a load.
            state: its state, as far as it says how long the wait takes; None for that of the cache.
        """
        computing = self._prefill.seconds(span)
        loads = 1
        if whole:
            now = state or self._state_of(fetch)
            loads = -(-now.reach // max(1, now.stop))
        if (
            not self._always
            and computing is not None
            and self._is_delayed(computing, others, loads)
        ):
            # Not the tier's fault: its rate is not doubted.
            return False
        return self._always or self._waits.is_worth_waiting(fetch, span, announced, whole, state)

    def is_layerwise(self, blocks: int, running: int, wanted: LoadMode | None = None) -> bool:
        """Whether to load blocks beside the forward pass of the same step. `wanted` is the mode
        that the request names, if it does; it counts if the engine supports both modes.

        A layerwise load saves a step, which is long if other requests compute. These requests wait
        for the load, too. On a GPU they wait for no other load; if the computing cores copy, any
        load slows them down.
        """
        mode = self._mode if wanted is None or self._mode is LoadMode.ASYNC else wanted
        if mode is not LoadMode.AUTO:
            return mode is LoadMode.LAYERWISE
        loading = self._loading(blocks + self.loading_now()) or 0.0
        if self._on_cores:
            return running > 0 or loading * _CONTENTION <= SLACK_SECONDS
        return running == 0 or loading <= SLACK_SECONDS

    def _probe(self, blocks: int, share: float, whole: bool) -> LoadChoice:
        """The blocks that measure the link again. Computing takes `share` of loading them all."""
        if whole:
            return LoadChoice(blocks)
        return LoadChoice(min(blocks, max(1, int(blocks * PROBE_SHARE * share))), Left.SLOW)

    def _is_delayed(self, computing: float, others: int, loads: int = 1) -> bool:
        """Whether asynchronous loads, one after the other, cost more time than computing, over all
        requests.

        The loaded request waits until the steps that the engine has begun meanwhile have ended.
        With full steps of long prompts, that may take many times longer than computing a short hit,
        which takes a part of one step. But computing delays all other requests, too. If the engine
        has no others, its steps are short.
        """
        if others == 0:
            return False
        delay = loads * self.steps_behind * self.timer.step_seconds
        return delay > max(computing * (1 + others), _MOST_DELAY_SECONDS)

    def _loading(self, blocks: int) -> float | None:
        """Seconds to load `blocks` blocks from host memory; None before the first measurement."""
        return self._device.seconds(blocks * self._block_bytes // self._ranks)
