# SPDX-License-Identifier: Apache-2.0
"""FlexKV's metrics at SGLang's `/metrics`. Except for the prefix, their names are those under vLLM.

SGLang's schedulers write their metrics to files, and its HTTP server adds the files up. Each rank
counts its own copies; rank 0 counts everything else. A counter without a label for the rank is
therefore the sum over all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from flexkv import CacheConfig
from flexkv.engine.boundary import ErrorBoundary
from flexkv.figures.definitions import GAUGES
from flexkv.figures.exposition import Exposition
from flexkv_sglang.side import RankSide

PREFIX = "sglang:flexkv_"
_THIS = 0


class Metrics:
    """The metrics of one rank.

    Args:
        config: FlexKV's settings.
        labels: SGLang's own labels of its metrics; None if SGLang's metrics are off.
        leads: whether this rank reports the gauges.
    """

    def __init__(
        self, config: CacheConfig, labels: Mapping[str, str] | None, *, leads: bool
    ) -> None:
        self._exposition: Exposition | None = None
        self._boundary = ErrorBoundary()
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
            self._exposition.observe(dict.fromkeys(GAUGES, 0.0), _THIS)

    def report(self, side: RankSide) -> None:
        """Report the samples that `side` has collected since the last call. Never raises."""
        if self._exposition is None:
            return
        with self._boundary.guard("counting", "the counts are lost"):
            if side.has_samples:
                self._exposition.observe(side.take_samples(), _THIS)
