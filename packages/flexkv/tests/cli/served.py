# SPDX-License-Identifier: Apache-2.0
"""FlexKV's metrics at a port, served as engines serve them: by prometheus_client, over HTTP."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from flexkv import CacheConfig
from flexkv.figures.definitions import Samples, bucket, sample
from flexkv.figures.exposition import Exposition


class Served:
    """An engine's metrics.

    Attributes:
        port: that they are served on; 0 while they are not.
    """

    def __init__(self, prefix: str = "vllm:flexkv_", model: str = "chat") -> None:
        self.port = 0
        self._prefix, self._model = prefix, model
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self._exposition: Exposition | None = None

    def start(self, port: int = 0) -> None:
        """The engine starts: its counters are 0."""
        registry = CollectorRegistry()
        counter, gauge, histogram = (
            functools.partial(make, registry=registry) for make in (Counter, Gauge, Histogram)
        )
        self._exposition = Exposition(
            self._prefix,
            counter,
            gauge,
            histogram,
            label_names=["model_name", "engine"],
            engines={0: [self._model, "0"]},
            config=CacheConfig(),
        )
        self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        self.port = self._server.server_port

    def stop(self) -> None:
        """The engine ends."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
        self._server = None

    def work(self) -> None:
        """A quarter of the tokens hits in host memory, another in an object store."""
        slow = bucket("load_seconds", 4)
        samples: Samples = {
            sample("query_tokens", "host"): 400,
            sample("query_tokens", "objects"): 300,
            sample("hit_tokens", "host"): 100,
            sample("hit_tokens", "objects"): 100,
            sample("saved_prefill_seconds"): 2.5,
            sample("copied_bytes", "device", "load"): 6 << 20,
            sample("copy_seconds", "device", "load"): 0.5,
            sample("bytes", "host"): 3 << 30,
            sample("capacity_bytes", "host"): 4 << 30,
            sample("circuits", "objects", "read", "open"): 1,
            sample("circuits", "objects", "write", "connecting"): 1,
            sample("eviction_policies", "host", "hazard"): 1,
            sample("eviction_policies", "disk", "lru"): 1,
            sample("guard_hit_blocks", "host", "used"): 30,
            sample("guard_hit_blocks", "host", "lru"): 24,
            sample("guard_fallbacks", "host"): 1,
            sample("expired_blocks", "host"): 1_500,
            sample("failures", "stalled", "objects"): 2,
            slow[0]: 4,
            slow[1]: 0.08,
        }
        assert self._exposition is not None
        self._exposition.observe(samples, 0)


@contextmanager
def served(prefix: str = "vllm:flexkv_", model: str = "chat") -> Iterator[Served]:
    """An engine that has worked once."""
    made = Served(prefix, model)
    made.start()
    made.work()
    try:
        yield made
    finally:
        made.stop()
