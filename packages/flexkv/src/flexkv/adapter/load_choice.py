# SPDX-License-Identifier: Apache-2.0
"""Whether a hit is worth loading, and how: by what computing and loading take in this engine."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexkv.adapter.cost import LinkPace, PrefillPace, Span, StepTimer
from flexkv.transfer.fetch import Fetch

_PROBE_SHARE = 0.03
"""Of the time that computing takes, what may be lost by a load or a wait that measures a link again
or for the first time: with what is lost elsewhere, less than the 5 % that a hit may cost more than
computing."""

_PROBE_SECONDS = 0.02
"""What may be lost in any case, once: a read of an NVMe drive takes 0.1 to 1 ms, and a step of the
engine without work, after which the drive is asked again, about as long; on a busy machine some
times that."""

_LATE = 2
"""A tier is expected to be as fast as it ever was lately. If nothing has come in so many times as
long, it is not."""

_SLACK_SECONDS = 0.005
"""Loads as short as this are made whatever computing takes: about a step of an engine, by which
both are measured."""

_CONTENTION = 0.15
"""Of a load, what loading beside a forward on the same cores adds. Tuned on two cores with
`nox -s bench -- --only load-modes`: layer by layer, time to first token of 82 MiB was 9 to 21 ms
longer than before the forward; of 32 MiB 5 ms shorter, as the step that is saved weighs more."""


class LoadMode(enum.Enum):
    """The setting `load_mode`."""

    ASYNC = "async"
    LAYERWISE = "layerwise"
    AUTO = "auto"


class Left(enum.Enum):
    """Why a hit, or a part of one, is not loaded. The values are those of the metric."""

    SHORT = "short"
    """It has fewer tokens than the setting `min_load_tokens`."""
    SLOW = "slow"
    """Loading it from host memory is expected to take longer than computing it."""
    AWAITED = "awaited"
    """Waiting for a lower tier is expected to take longer than computing it."""


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """How many of a hit's blocks to load, from the first on.

    Attributes:
        blocks: to load.
        left: why not all.
    """

    blocks: int
    left: Left | None = None


@dataclass(slots=True)
class _Wait:
    """A fetch that a request may wait for.

    Attributes:
        ahead: blocks that other requests waited for when it was first asked about.
        refused: whether the answer was not to wait.
    """

    ahead: int
    refused: bool = False


class LoadChooser:
    """Decides for single requests.

    No estimate decides for ever: if a rate has kept hits from being loaded for a while, a small
    load or a short wait measures it again.

    Args:
        mode: the setting in force; LAYERWISE and AUTO only where the engine can do it.
        min_tokens: the setting `min_load_tokens`.
        always: the setting `always_load`.
        block_bytes: of a FlexKV block over all ranks.
        ranks: of the engine; all load at once.
        on_cores: the cores that copy also compute.
        loading: how many blocks are on their way from host memory now.
        clock: that steps are measured with.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mode = mode
        self._min_tokens = min_tokens
        self._always = always
        self._block_bytes = block_bytes
        self._ranks = ranks
        self._on_cores = on_cores
        self._loading_now = loading
        self._prefill = PrefillPace()
        self._device = LinkPace()
        self._disk = LinkPace()
        self._timer = StepTimer(self._prefill, clock)
        self._waits: dict[Fetch, _Wait] = {}

    def step_begins(self, spans: Sequence[Span]) -> int:
        """A step that computes `spans` of prompts is given out. Returns the number that its report
        bears, or 0 if none is wanted."""
        return self._timer.begins(spans) if spans else 0

    def step_ended(self, number: int) -> None:
        """A step has ended; `number` is that of its report, or 0."""
        self._timer.ended(number)

    def loaded(self, rate: float) -> None:
        """A rank has loaded so many bytes per second; 0 if it has loaded nothing."""
        self._device.observe(rate, 1.0)

    def left(self, reason: Left) -> None:
        """The engine computes a hit, or a part of it, because of an answer given here."""
        if reason is Left.SLOW:
            self._device.refuse()

    def fetched(self, fetch: Fetch) -> None:
        """A fetch has ended."""
        wait = self._waits.pop(fetch, _Wait(0))
        came = fetch.arrived - fetch.first
        waited = time.monotonic() - fetch.begun
        if came:
            # The tier has read what was ahead meanwhile.
            size = (came + wait.ahead) * self._block_bytes
            self._disk.observe(size, fetch.progressed - fetch.begun)
        elif not fetch.done and waited > self._latest(fetch, wait):
            self._disk.contradict(self._block_bytes, waited)
        if came or not wait.refused:
            return
        if self._disk.doubtful and waited >= _PROBE_SECONDS:
            self._disk.give_up()
        else:
            self._disk.refuse()

    def choose_load(self, span: Span, blocks: int, *, whole: bool = False) -> LoadChoice:
        """How much to load of `span`, which is in host memory, in so many blocks; all or nothing if
        a part is worth nothing (`whole`)."""
        if span.tokens < self._min_tokens:
            return LoadChoice(0, Left.SHORT)
        loading = self._loading(blocks + self._loading_now())
        computing = self._prefill.seconds(span)
        if self._always or loading is None or computing is None:
            return LoadChoice(blocks)
        if loading <= max(computing, _SLACK_SECONDS):
            return LoadChoice(blocks)
        if not self._device.doubtful:
            return LoadChoice(0, Left.SLOW)
        if whole:
            return LoadChoice(blocks)
        share = _PROBE_SHARE * computing / loading
        return LoadChoice(min(blocks, max(1, int(blocks * share))), Left.SLOW)

    def is_worth_waiting(self, fetch: Fetch, span: Span) -> bool:
        """Whether to wait for the rest of a fetch rather than to compute it.

        Args:
            fetch: under way.
            span: what all its blocks hold.
        """
        if fetch not in self._waits:
            self._waits[fetch] = _Wait(sum(f.stop - f.arrived for f in self._waits))
        wait = self._waits[fetch]
        wait.refused = not self._is_worth_waiting(fetch, span, wait)
        return not wait.refused

    def _is_worth_waiting(self, fetch: Fetch, span: Span, wait: _Wait) -> bool:
        total = fetch.stop
        first_missing = span.start + span.tokens * fetch.arrived // total
        gain = self._prefill.seconds(Span(first_missing, span.stop))
        whole = self._prefill.seconds(span)
        if self._always or gain is None or whole is None:
            return True
        waited = time.monotonic() - fetch.begun
        rest: float | None = fetch.seconds_left
        if fetch.arrived == fetch.first:
            # Nothing has come yet that would tell.
            rest = self._disk.seconds((total - fetch.arrived + wait.ahead) * self._block_bytes)
            if rest is not None and waited > self._latest(fetch, wait):
                return False
        if rest is not None and rest < max(gain, _SLACK_SECONDS):
            return True
        if rest is not None and not self._disk.doubtful:
            return False
        return waited < max(_PROBE_SECONDS, _PROBE_SHARE * whole) * self._disk.patience

    def is_layerwise(self, blocks: int, running: int, wanted: LoadMode | None = None) -> bool:
        """Whether to load so many blocks beside the forward of the same step, in which `running`
        other requests compute.

        That saves a step, which is long where others compute. They wait for the load, too: on a
        GPU only then. Where the cores that compute copy, they are slower with any load.

        The request may have `wanted` a mode, which counts where the engine is ready for both.
        """
        mode = self._mode if wanted is None or self._mode is LoadMode.ASYNC else wanted
        if mode is not LoadMode.AUTO:
            return mode is LoadMode.LAYERWISE
        loading = self._loading(blocks + self._loading_now()) or 0.0
        if self._on_cores:
            return running > 0 or loading * _CONTENTION <= _SLACK_SECONDS
        return running == 0 or loading <= _SLACK_SECONDS

    def _latest(self, fetch: Fetch, wait: _Wait) -> float:
        """Seconds in which some of a fetch of which nothing has come should have, after what others
        waited for before."""
        blocks = fetch.stop - fetch.arrived + wait.ahead
        return _LATE * (self._disk.seconds(blocks * self._block_bytes) or 0.0) + _PROBE_SECONDS

    def _loading(self, blocks: int) -> float | None:
        """Seconds that so many blocks take from host memory; None as long as nothing is known."""
        return self._device.seconds(blocks * self._block_bytes // self._ranks)
