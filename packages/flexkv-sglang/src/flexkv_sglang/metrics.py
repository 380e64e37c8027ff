# SPDX-License-Identifier: Apache-2.0
"""FlexKV's figures at SGLang's `/metrics`, under the same names as at vLLM's.

SGLang's schedulers write their metrics to files that its HTTP server adds up. Every rank counts its
own copies, and rank 0 all else, so that counters without a label of the rank are those of all ranks
together.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from flexkv import CacheConfig
from flexkv.adapter.exposition import Exposition
from flexkv.adapter.guard import Edge
from flexkv.adapter.metrics import GAUGES
from flexkv_sglang.side import RankSide

PREFIX = "sglang:flexkv_"
_THIS = 0


class Metrics:
    """What one rank reports.

    Args:
        config: FlexKV's settings.
        labels: SGLang's own; None if nobody asks for metrics.
        leads: whether this rank reports what has a last value.
    """

    def __init__(
        self, config: CacheConfig, labels: Mapping[str, str] | None, *, leads: bool
    ) -> None:
        self._exposition: Exposition | None = None
        self._edge = Edge()
        if labels is None:
            return
        # Imported late: it looks at once for the folder that SGLang names in the environment.
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
            # Of a value that nobody has set, the server that adds up the files shows nothing.
            self._exposition.observe(dict.fromkeys(GAUGES, 0.0), _THIS)

    def report(self, side: RankSide) -> None:
        """Report what a rank has counted since the last call."""
        if self._exposition is not None and side.has_samples:
            with self._edge.guard("counting", "the counts are lost"):
                self._exposition.observe(side.take_samples(), _THIS)
