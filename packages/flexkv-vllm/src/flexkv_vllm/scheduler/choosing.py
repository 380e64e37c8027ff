# SPDX-License-Identifier: Apache-2.0
"""Whether a hit is worth loading, and how: by what computing and loading take in this engine."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence

from flexkv import Fetch
from flexkv_vllm.scheduler.paces import LEAST_TOKENS, LinkPace, PrefillPace, Span

_PROBE_SHARE = 0.03
"""Of the time that computing takes, what may be lost by waiting for a tier of which nothing is
known: with what is lost elsewhere, less than the 5 % that a hit may cost more than computing."""

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

_STEPS = 64
"""Steps of which a report may still come."""

_SKIPS = 16
"""A tier that was too slow is tried again after so many hits that it would have been asked for."""


class LoadMode(enum.Enum):
    """The setting `load_mode`."""

    ASYNC = "async"
    LAYERWISE = "layerwise"
    AUTO = "auto"


class LoadChooser:
    """Decides for single requests.

    Args:
        mode: the setting in force; LAYERWISE and AUTO only where the engine can do it.
        min_tokens: the setting `min_load_tokens`.
        always: the setting `always_load`.
        block_bytes: of a FlexKV block over all ranks.
        ranks: of the engine; all load at once.
        on_cores: the cores that copy also compute.
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
    ) -> None:
        self._mode = mode
        self._min_tokens = min_tokens
        self._always = always
        self._skips = 0
        self._block_bytes = block_bytes
        self._ranks = ranks
        self._on_cores = on_cores
        self._prefill = PrefillPace()
        self._device = LinkPace()
        self._disk = LinkPace()
        self._steps: dict[int, tuple[float, list[Span]]] = {}
        self._next_step = 1
        self._last_end = 0.0
        self._last_arrival = 0.0

    def step_begins(self, spans: Sequence[Span]) -> int:
        """A step that computes `spans` is given out. Returns the number that its report bears, or 0
        if none is wanted."""
        if sum(span.tokens for span in spans) < LEAST_TOKENS:
            return 0
        number = self._next_step
        self._next_step += 1
        # vLLM's own connector passes no reports on, and what is under way are a few steps at most.
        self._steps.pop(number - _STEPS, None)
        self._steps[number] = time.monotonic(), list(spans)
        return number

    def step_ended(self, number: int) -> None:
        """A step has ended; `number` is that of its report, or 0. vLLM may give out a step before
        the last one has ended, and then it begins with that."""
        now = time.monotonic()
        begun, spans = self._steps.pop(number, (now, []))
        self._prefill.observe(spans, now - max(begun, self._last_end))
        self._last_end = now

    def loaded(self, rate: float) -> None:
        """A rank has loaded so many bytes per second; 0 if it has loaded nothing."""
        self._device.observe(rate, 1.0)

    def fetched(self, fetch: Fetch) -> None:
        """A fetch has ended."""
        came = fetch.arrived - fetch.first
        waited = self._waited(fetch)
        if came:
            self._disk.observe(came * self._block_bytes, fetch.progressed - fetch.begun)
        elif not fetch.done and waited > self._latest(fetch):
            self._disk.contradict(self._block_bytes, waited)

    def is_worth_loading(self, span: Span, blocks: int) -> bool:
        """Whether to load `span`, which is in host memory, in so many blocks."""
        if span.tokens < self._min_tokens:
            return False
        loading = self._loading(blocks)
        computing = self._prefill.seconds(span)
        if self._always or loading is None or computing is None:
            return True
        return loading <= max(computing, _SLACK_SECONDS)

    def is_worth_waiting(self, fetch: Fetch, span: Span) -> bool:
        """Whether to wait for the rest of a fetch rather than to compute it.

        Args:
            fetch: under way.
            span: what all its blocks hold.
        """
        total = fetch.stop
        first_missing = span.start + span.tokens * fetch.arrived // total
        gain = self._prefill.seconds(Span(first_missing, span.stop))
        whole = self._prefill.seconds(span)
        if self._always or gain is None or whole is None:
            return True
        waited = self._waited(fetch)
        rest: float | None = fetch.seconds_left
        if fetch.arrived == fetch.first:
            # Nothing has come yet that would tell.
            rest = self._disk.seconds((total - fetch.arrived) * self._block_bytes)
            if rest is not None and waited > self._latest(fetch):
                return False
        if rest is not None and rest < max(gain, _SLACK_SECONDS):
            self._skips = 0
            return True
        if rest is not None and self._skips < _SKIPS:
            self._skips += 1
            return False
        if waited < max(_PROBE_SECONDS, _PROBE_SHARE * whole):
            return True
        self._skips = 0
        return False

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
        loading = self._loading(blocks) or 0.0
        if self._on_cores:
            return running > 0 or loading * _CONTENTION <= _SLACK_SECONDS
        return running == 0 or loading <= _SLACK_SECONDS

    def _waited(self, fetch: Fetch) -> float:
        """Seconds in which neither this fetch nor another one has got anything."""
        if fetch.arrived > fetch.first:
            self._last_arrival = max(self._last_arrival, fetch.progressed)
        return time.monotonic() - max(fetch.begun, self._last_arrival)

    def _latest(self, fetch: Fetch) -> float:
        """Seconds in which some of a fetch of which nothing has come should have."""
        whole = self._disk.seconds((fetch.stop - fetch.arrived) * self._block_bytes)
        return _LATE * (whole or 0.0) + _PROBE_SECONDS

    def _loading(self, blocks: int) -> float | None:
        """Seconds that so many blocks take from host memory; None as long as nothing is known."""
        return self._device.seconds(blocks * self._block_bytes // self._ranks)
