# SPDX-License-Identifier: Apache-2.0
"""What the service answers to operators, on a socket in its directory, and on a port if one is
wanted. The port shows figures only.

    GET /metrics    the metrics, in Prometheus's text format
    GET /health     200 with what is wrong, or 503 if the service's loop does not answer
    GET /state      `ServiceState`; on the socket only
    POST /clear     clear pools, `?fingerprint=` names one or all; `Cleared`; on the socket only
    POST /lookup    `PromptQuestion`, to pools as above; `AllPlaces`; on the socket only

Threads of the doors answer. The loop gives them what they say of the service, between two of its
turns and within `_LOOP_SECONDS`. So nobody who asks can delay an engine by more than one such look.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from flexkv.client import Reset
from flexkv.figures.definitions import METRICS, Labels, Samples
from flexkv.figures.exposition import INFO_LABELS, INFO_NAME, INFO_TEXT, info_labels
from flexkv.figures.families import families
from flexkv.figures.health_samples import ok_sample
from flexkv.figures.tenant_samples import TENANT_METRICS
from flexkv.operators.answers import await_removals, find_blocks
from flexkv.operators.door import JSON, TEXT, Door, DoorRequest
from flexkv.operators.verbs import LOOKUP, PromptPlaces, PromptQuestion, RefusedError, SilentError
from flexkv.service import messages as wire
from flexkv.service.attached import AttachedEngine
from flexkv.service.pool import SharedPool
from flexkv.service.state import (
    SERVICE_METRICS,
    SOCKET,
    Cleared,
    PoolState,
    ServiceState,
    own_figures,
)
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.settings import CacheConfig
from flexkv.types.changes import Medium
from flexkv.types.texts import printable
from flexkv.version import __version__

logger = logging.getLogger(__name__)

Told = TypeVar("Told")

_REMOVED = (
    "the sockets in its directory were removed or replaced: no engine can attach, and running ones "
    "keep what they have; start the service again"
)

_KEYS = 4096
"""Blocks that one turn of the loop looks up: about a millisecond."""
_LOOP_SECONDS = 2.0
"""Seconds within which the service's loop must answer. It mostly takes milliseconds."""


class SilentLoopError(SilentError):
    """The service's loop has not come to a request in time."""

    def __init__(self) -> None:
        super().__init__(f"the loop of the service has not answered for {_LOOP_SECONDS:g} s")


class Operators:
    """Owns the doors. Their threads wait for the loop in `_ask`, which makes the calls given there.
    The public methods are the loop's, too.

    The directory is borrowed. `figures`, a listening socket of the network for figures, is owned.
    The loop reads `pools`, `engines`, and `refused` of its lobby; `wake` lets it begin a turn.
    Raises ArenaError if the directory cannot be used.
    """

    def __init__(
        self,
        directory: RuntimeDirectory,
        figures: socket.socket | None,
        config: CacheConfig,
        *,
        pools: Mapping[wire.PoolBlocks, SharedPool],
        engines: Mapping[tuple[wire.PoolBlocks, int], AttachedEngine],
        refused: Mapping[str, str],
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._directory = directory
        self._has_said = False
        self._pools, self._engines, self._refused = pools, engines, refused
        self._wake = wake
        self._began = time.monotonic()
        self._guard = threading.Lock()
        self._asked: deque[Callable[[], None]] | None = deque()
        shown = {("GET", "/metrics"): self._answer_metrics, ("GET", "/health"): self._answer_health}
        asked = shown | {
            ("GET", "/state"): self._answer_state,
            ("POST", "/clear"): self._answer_clear,
            ("POST", LOOKUP.path): self._answer_lookup,
        }
        self._doors = [Door(directory.listen(SOCKET), asked, is_open=False)]
        if figures is not None:
            self._doors.append(Door(figures, shown, is_open=True))

    def serve(self) -> None:
        """Answer what was asked since the last turn."""
        asked = self._asked
        while asked:
            asked.popleft()()

    def close(self) -> None:
        """Answer no more. Idempotent."""
        with self._guard:
            self._asked = None
        for door in self._doors:
            door.close()
        self._doors.clear()
        self._directory.remove(SOCKET)

    def _answer_metrics(self, _: DoorRequest) -> tuple[bytes, str]:
        return exposition(self._watched_state(), self._config), CONTENT_TYPE_LATEST

    def _answer_health(self, _: DoorRequest) -> tuple[bytes, str]:
        text = "\n".join(self._watched_state().problems) or "ok"
        return f"{text}\n".encode(), TEXT

    def _answer_state(self, _: DoorRequest) -> tuple[bytes, str]:
        return msgspec.json.encode(self._watched_state()), JSON

    def _answer_clear(self, asked: DoorRequest) -> tuple[bytes, str]:
        """Drop the blocks of pools, in memory and on disk. Shared stores keep theirs. Answers once
        the drives keep that over a power failure; the loop goes on meanwhile."""
        chosen = asked.query.get("fingerprint")
        if not chosen:
            raise RefusedError("fingerprint is missing; allowed: a fingerprint, or all")
        count, removals = self._ask(lambda: self._clear(None if chosen == "all" else chosen))
        return msgspec.json.encode(Cleared(count, await_removals(removals))), JSON

    def _answer_lookup(self, asked: DoorRequest) -> tuple[bytes, str]:
        """Where pools have the blocks of a prompt. The loop looks up some at a time."""
        question = LOOKUP.read(asked.body)
        if not question.hashes:
            raise RefusedError(
                "the prompt has tokens, and a service knows no tokens; allowed: the engine's "
                "hashes of its blocks, or to ask an engine of the service"
            )
        chosen = self._ask(lambda: self._chosen(asked.query.get("fingerprint")))
        found = tuple(self._places(blocks, question) for blocks in chosen)
        return msgspec.json.encode(found), JSON

    def _watched_state(self) -> ServiceState:
        """The state of the service, and whether engines can still find it."""
        state = self._ask(self._state)
        # In the asking thread: a file system that hangs stops no engine.
        is_shown = all(self._directory.shows(each) for each in (wire.SOCKET, SOCKET))
        if is_shown or self._asked is None:  # closed meanwhile
            return state
        if not self._has_said:
            self._has_said = True
            logger.error("%s", _REMOVED)
        return msgspec.structs.replace(state, troubles=(_REMOVED, *state.troubles))

    def _ask(self, call: Callable[[], Told]) -> Told:
        """Have the loop make a call. Raises SilentLoopError if it does not come to it in time."""
        told: Future[Told] = Future()

        def answer() -> None:
            if not told.set_running_or_notify_cancel():
                return
            try:
                told.set_result(call())
            except Exception as error:  # noqa: BLE001 - it is the asking thread's
                told.set_exception(error)

        with self._guard:
            if self._asked is None:
                raise SilentLoopError
            self._asked.append(answer)
            self._wake()
        try:
            return told.result(_LOOP_SECONDS)
        except TimeoutError:
            if told.cancel():
                raise SilentLoopError from None
            return told.result()  # the loop is at it

    def _state(self) -> ServiceState:
        seconds = time.monotonic() - self._began
        pools = (self._state_of(blocks, pool) for blocks, pool in self._pools.items())
        refused = (
            f"refused an engine{model and f' of the model {model!r}'}, and let none in since: "
            f"{printable(reason)}"
            for model, reason in self._refused.items()
        )
        return ServiceState(__version__, seconds, tuple(pools), tuple(refused))

    def _state_of(self, blocks: wire.PoolBlocks, pool: SharedPool) -> PoolState:
        figures = pool.cache.figures()
        engines = tuple(each.state for each in self._engines_of(pool))
        own = own_figures(engines, pool.prompt_blocks, pool.found_blocks)
        values = own | figures.own | figures.shared
        values |= ok_sample(values)
        return PoolState(
            blocks.fingerprint,
            pool.model,
            blocks.identity,
            pool.num_slots,
            pool.cache.info.slot_bytes,
            pool.policy,
            {name: float(value) for name, value in values.items()},
            engines,
            pool.tenants,
        )

    def _clear(self, fingerprint: str | None) -> tuple[dict[str, int], list[Future[str]]]:
        pools = self._chosen(fingerprint)
        chosen = {blocks.fingerprint: pool for blocks, pool in pools.items()}
        count = {name: pool.cache.ready_blocks for name, pool in chosen.items()}
        for pool in chosen.values():
            for engine in self._engines_of(pool):
                engine.cleared()
            pool.cache.reset(Reset.EMPTY)
        logger.info("an operator cleared %d pools with %d blocks", len(count), sum(count.values()))
        return count, [asked for pool in chosen.values() for asked in pool.cache.sync()]

    def _chosen(self, fingerprint: str | None) -> dict[wire.PoolBlocks, SharedPool]:
        """The pool of a fingerprint; None for all."""
        chosen = {
            blocks: pool
            for blocks, pool in self._pools.items()
            if fingerprint in (None, blocks.fingerprint)
        }
        if fingerprint is not None and not chosen:
            known = ", ".join(each.fingerprint for each in self._pools) or "none yet"
            raise RefusedError(f"no pool has the fingerprint {fingerprint!r}; allowed: {known}")
        return chosen

    def _places(self, blocks: wire.PoolBlocks, question: PromptQuestion) -> PromptPlaces:
        step = blocks.engine_blocks
        keys = [bytes.fromhex(each) for each in question.hashes[step - 1 :: step]]
        found = find_blocks(
            lambda part: self._ask(lambda: self._where(blocks, part)),
            (keys[start : start + _KEYS] for start in range(0, len(keys), _KEYS)),
        )
        return PromptPlaces("", blocks.fingerprint, len(keys), found.blocks, None, found.tiers)

    def _where(
        self, blocks: wire.PoolBlocks, keys: Sequence[bytes]
    ) -> Mapping[Medium, Sequence[bool | None]]:
        pool = self._pools.get(blocks)
        if pool is None:
            raise RefusedError(f"the pool of {blocks.fingerprint} has ended; allowed: to ask again")
        return pool.cache.where(keys)

    def _engines_of(self, pool: SharedPool) -> list[AttachedEngine]:
        return [each for each in self._engines.values() if each.pool is pool]


PREFIX = "service:flexkv_"
"""Begins the names of the service's metrics, as `vllm:flexkv_` begins those of vLLM's engines."""

_POOL = ("pool", "model_name")


def exposition(state: ServiceState, config: CacheConfig) -> bytes:
    """The state as metrics, in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(state, config))
    text: bytes = generate_latest(registry)
    return text


class _Collector:
    def __init__(self, state: ServiceState, config: CacheConfig) -> None:
        self._state = state
        self._config = config

    def collect(self) -> Iterator[Family]:
        """As prometheus_client asks for it."""
        about = GaugeMetricFamily(PREFIX + INFO_NAME, INFO_TEXT, labels=INFO_LABELS)
        about.add_metric(info_labels(self._config), 1)
        yield about
        sources: dict[Labels, Samples] = {
            (pool.fingerprint, pool.model): pool.figures for pool in self._state.pools
        }
        yield from families(PREFIX, _POOL, sources, (*SERVICE_METRICS, *METRICS))
        yield from self._tenants()

    def _tenants(self) -> Iterator[Family]:
        """Of tenants, whose names are not known before."""
        names = [*_POOL, "tenant"]
        has, share = (
            GaugeMetricFamily(PREFIX + metric.name, metric.text, labels=names)
            for metric in TENANT_METRICS
        )
        for pool in self._state.pools:
            for each in pool.tenants:
                if each.name:
                    labels = (pool.fingerprint, pool.model, each.name)
                    has.add_metric(labels, each.blocks)
                    share.add_metric(labels, each.share)
        yield from (family for family in (has, share) if family.samples)
