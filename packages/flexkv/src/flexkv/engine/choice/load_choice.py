# SPDX-License-Identifier: Apache-2.0
"""Decides whether and how to load a hit, by the measured times of computing and loading."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexkv.client import FetchId, FetchState
from flexkv.engine.choice.cost import LinkPace, PrefillPace, Span, StepTimer
from flexkv.engine.choice.wait_choice import PROBE_SHARE, SLACK_SECONDS, WaitChooser

_MOST_DELAY_SECONDS = 0.25
"""A delay of a load up to this is accepted: hardly anyone notices it, and the load spares the
engine the time to compute. Not tuned."""

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
    """How many blocks of a hit to load, from the first on.

    Attributes:
        blocks: number of blocks to load.
        left: why the others are not loaded; None if all are.
    """

    blocks: int
    left: Left | None = None


class LoadChooser:
    """Decides about the load of each request.

    No estimate decides for ever: if a rate has prevented loads for a while, a small load or a short
    wait measures it again.

    Args:
        mode: the setting in force; LAYERWISE and AUTO only where the engine can do it.
        min_tokens: the setting `min_load_tokens`.
        always: the setting `always_load`.
        block_bytes: bytes of a FlexKV block over all ranks.
        ranks: number of ranks of the engine; all load at once.
        on_cores: whether the cores that copy also compute.
        loading: returns how many blocks are being loaded from host memory now.
        state_of: returns the state of a fetch; see `CacheClient.fetch_state`.
        steps_behind: steps of the engine that pass between the order of an asynchronous load and
            the step that computes the request.
        clock: measures steps.

    Attributes:
        timer: takes the ends of steps.
        steps_behind: as given, 0 unless loads are asynchronous; the owner sets it where it varies.
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
        self._loading_now = loading
        self._state_of = state_of
        self.steps_behind = steps_behind if mode is LoadMode.ASYNC else 0
        self._prefill = PrefillPace()
        self._device = LinkPace()
        self.timer = StepTimer(self._prefill, clock)
        self._waits = WaitChooser(self._prefill, block_bytes, state_of)

    @property
    def prefill_cost(self) -> tuple[float, float] | None:
        """See `PrefillPace.cost`."""
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
        """Choose how many blocks of a hit in host memory to load, from the first on.

        Args:
            span: tokens of the hit.
            blocks: number of FlexKV blocks of the hit.
            whole: whether a part is of no use, so that all or none are loaded.
            others: other requests that the engine has, queued or running.
        """
        if span.tokens < self._min_tokens:
            return LoadChoice(0, Left.SHORT)
        loading = self._loading(blocks + self._loading_now())
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
    ) -> bool:
        """Whether to wait for the rest of a fetch rather than to compute it.

        Args:
            fetch: the fetch, still under way.
            span: the tokens of all its blocks.
            others: other requests that the engine has, queued or running.
            announced: whether another engine is said to write blocks of it to a shared store.
            whole: whether the span ends with the blocks for which host memory has no room yet. Each
                part for which it has room is a load.
        """
        computing = self._prefill.seconds(span)
        loads = 1
        if whole:
            state = self._state_of(fetch)
            loads = -(-state.reach // max(1, state.stop))
        if (
            not self._always
            and computing is not None
            and self._is_delayed(computing, others, loads)
        ):
            # Not the tier's fault: its rate is not doubted.
            return False
        return self._always or self._waits.is_worth_waiting(fetch, span, announced, whole)

    def is_layerwise(self, blocks: int, running: int, wanted: LoadMode | None = None) -> bool:
        """Whether to load blocks beside the forward pass of the same step.

        A layerwise load saves a step, which is long if other requests compute. These requests wait
        for the load, too. On a GPU they wait for no other load; if the computing cores copy, any
        load slows them down.

        Args:
            blocks: number of FlexKV blocks of the load.
            running: other requests that compute in the step.
            wanted: the mode that the request names; None if it names none. It counts if the engine
                supports both modes.
        """
        mode = self._mode if wanted is None or self._mode is LoadMode.ASYNC else wanted
        if mode is not LoadMode.AUTO:
            return mode is LoadMode.LAYERWISE
        loading = self._loading(blocks + self._loading_now()) or 0.0
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
