# SPDX-License-Identifier: Apache-2.0
"""FlexKV's figures at SGLang's `/metrics`, and once a minute in its log.

Except for the prefix, the names of the metrics are those under vLLM. SGLang's schedulers write
their metrics to files, and its HTTP server adds the files up. Each rank counts its own copies; rank
0 counts everything else. A counter without a label for the rank is therefore the sum over all
ranks.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping

from flexkv import CacheConfig
from flexkv.engine.boundary import ErrorBoundary
from flexkv.figures.definitions import Samples, add
from flexkv.figures.exposition import Exposition, summary
from flexkv_sglang.side import RankSide

logger = logging.getLogger("flexkv.sglang")

PREFIX = "sglang:flexkv_"
_THIS = 0

LINE_SECONDS = 60.0
"""Seconds between two lines of the log."""


class Metrics:
    """The metrics of one rank.

    Args:
        labels: SGLang's own labels of its metrics; None if SGLang's metrics are off.
        leads: whether this rank reports the gauges and writes the log's lines.
    """

    def __init__(
        self, config: CacheConfig, labels: Mapping[str, str] | None, *, leads: bool
    ) -> None:
        self._exposition: Exposition | None = None
        self._boundary = ErrorBoundary()
        self._leads = leads
        self._unlogged: Samples = {}
        self._logged_at = time.monotonic()
        if labels is None:
            return
        # Imported late: on import, it reads the folder that SGLang names in the environment.
        from prometheus_client import Counter, Gauge, Histogram

        self._exposition = Exposition(
            PREFIX,
            Counter,
            functools.partial(Gauge, multiprocess_mode="mostrecent"),
            Histogram,
            label_names=list(labels),
            engines={_THIS: list(labels.values())},
            config=config,
        )
        if leads:
            # The server that adds up the files omits gauges that no rank has set.
            self._exposition.zero_gauges()

    def report(self, side: RankSide) -> None:
        """Report the samples that `side` has collected since the last call. Never raises."""
        logs = self._leads and time.monotonic() >= self._logged_at + LINE_SECONDS
        if self._exposition is None and not logs:
            return
        with self._boundary.guard("counting", "the counts are lost"):
            if side.has_samples:
                samples = side.take_samples()
                if self._leads:
                    add(self._unlogged, samples)
                if self._exposition is not None:
                    self._exposition.observe(samples, _THIS)
            if logs:
                self._log()

    def _log(self) -> None:
        """Log the changes since the last line, if there are any."""
        line, self._unlogged = summary(self._unlogged), {}
        now = time.monotonic()
        seconds, self._logged_at = now - self._logged_at, now
        if line:
            text = ", ".join(f"{name}={value}" for name, value in line.items())
            logger.info("FlexKV in the last %.0f s: %s", seconds, text)
