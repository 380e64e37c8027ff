# SPDX-License-Identifier: Apache-2.0
"""As `inside.py`: private parts of FlexKV in an engine's scheduler and workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pytest


def scheduler_of(connector: Any) -> Any:
    """The side of a connector in vLLM's scheduler."""
    return connector._scheduler


def set_scheduler(connector: Any, side: Any) -> None:
    connector._scheduler = side


def worker_of(owner: Any) -> Any:
    """The side of a connector in a worker of vLLM's; what copies the pages of a rank of SGLang."""
    return owner._worker


def set_worker(connector: Any, side: Any) -> None:
    connector._worker = side


def events_of(connector: Any) -> Any:
    """What reports KV events; None if nobody listens."""
    return connector._events


def failures_of(owner: Any) -> dict[str, int]:
    """Errors that did not reach vLLM, by what failed."""
    failures: dict[str, int] = owner._boundary.failures
    return failures


def fail_by_request(connector: Any, by_request: bool) -> None:
    """Whether a connector reports failed loads by their requests."""
    connector._by_request = by_request


def failed_requests(connector: Any) -> set[str]:
    """The requests with failed loads that a worker reports now."""
    failed: set[str] = connector._take_failed_requests()
    return failed


def poll_side(side: Any) -> None:
    """A scheduler's side or a manager sees what has ended, without a step of the engine."""
    side._poll()


def polling_failures(side: Any) -> int:
    """Errors of a scheduler's side while it polled the cache."""
    count: int = side._engine.boundary.failures["polling the cache"]
    return count


def tracked_requests(side: Any) -> Mapping[str, Any]:
    """What a scheduler's side knows of requests, by their ids."""
    requests: Mapping[str, Any] = side._requests
    return requests


def ignored_parameters(side: Any) -> int:
    """Parameters of requests that FlexKV could not use."""
    count: int = side._engine.options.ignored
    return count


def hints_of(side: Any) -> Mapping[Any, int]:
    """The number of hints, by action and result."""
    hints: Mapping[Any, int] = side._engine.options.hints
    return hints


def orders_of(side: Any) -> Any:
    """What a scheduler's side orders with the next step."""
    return side._orders


def loads_of(side: Any) -> Any:
    """The loads of a scheduler's side."""
    return side._loads


def fetches_of_loads(side: Any) -> Any:
    """What a scheduler's side fetches for its requests."""
    return side._loads.fetches


def side_stores(side: Any) -> Any:
    """The stores of a scheduler's side."""
    return side._stores


def stores_under_way(side: Any) -> Mapping[int, Any]:
    """Stores of a scheduler's side that have begun, by their ids."""
    stores: Mapping[int, Any] = side._stores.under_way
    return stores


def tables_of(side: Any) -> Any:
    """The block tables of requests, as a scheduler's side follows them."""
    return side._tables


def keys_of_side(side: Any) -> Any:
    """What makes the keys of a request's blocks."""
    return side._keys


def groups_of(side: Any) -> Sequence[Any]:
    """The KV cache groups of a model."""
    groups: Sequence[Any] = side._groups.members
    return groups


def set_idle_clock(owner: Any, clock: Callable[[], float]) -> None:
    """The time without requests passes by another clock."""
    owner._idle_steps._clock = clock


def assert_untracked(side: Any, empty_orders: Any) -> None:
    """A scheduler's side knows of no request, load or store, and has no orders."""
    assert side._requests == {}
    assert side._loads.unfinished == side._loads._running == {}
    assert side._stores.under_way == {}
    assert side._orders == empty_orders


def expect_stamps(events: Any) -> None:
    """As with a vLLM whose block hashes have the adapter's stamp."""
    events._has_stamps = True


def worker_copies(worker: Any) -> Any:
    """The copies of a worker that have begun."""
    return worker._copies


def mover_of(worker: Any) -> Any:
    """What copies a worker's blocks."""
    return worker._copies.mover


def set_mover(worker: Any, mover: Any) -> None:
    worker._copies.mover = mover


def stores_of_worker(worker: Any) -> Mapping[int, int]:
    """Tickets of a worker's stores that have not ended, by their ids."""
    stores: Mapping[int, int] = worker._stores
    return stores


def note_received(worker: Any, request_id: str) -> None:
    """As if all blocks of a request had been loaded in this step."""
    worker._received.add(request_id)


def loads_alone(worker: Any) -> bool:
    """Whether no other connector loads beside a worker."""
    alone: bool = worker._alone
    return alone


def assert_no_copy(worker: Any) -> None:
    """A worker copies nothing, and knows nothing of any request."""
    assert worker._loads == worker._stores == {}
    assert not worker._layerwise.running


def forget_stamps() -> None:
    """As in a new process, the stamps of LoRA adapters are not known."""
    from flexkv_vllm import keys

    keys._stamp.cache_clear()


def requests_of_manager(manager: Any) -> Mapping[str, Any]:
    """Requests that an OffloadingManager looks up or loads, by their ids."""
    requests: Mapping[str, Any] = manager._requests
    return requests


def switch_on(manager: Any) -> None:
    """A manager goes on as if it had not been closed or turned off."""
    manager._closed = manager._is_off = False


def assert_manager_at_rest(manager: Any) -> None:
    """An OffloadingManager knows of no request, and vLLM of no transfer."""
    assert manager._requests == manager._looked_up == {}
    assert manager._ordered == set()


def change_weights(manager: Any) -> None:
    """As if vLLM had other weights now."""
    manager._weights_changed(sure=True)


def keep_at_resets(patch: pytest.MonkeyPatch, owner: Any) -> None:
    """A reset of vLLM's keeps the blocks, as at a pause."""
    patch.setattr(owner._weights, "reset", lambda keep, discard: keep())


def tiers_of(tier: Any) -> Collection[Any]:
    """The tiers of FlexKV's that a `FlexKVTier` has; none once it is closed."""
    tiers: Collection[Any] = tier._tiers
    return tiers


@contextlib.contextmanager
def lose_job(tier: Any) -> Iterator[None]:
    """The first job of a `FlexKVTier` begins, and an error follows."""
    end = tier._end_if_done

    def fail_once(job: Any) -> None:
        tier._end_if_done = end
        raise RuntimeError("broken by the test")

    tier._end_if_done = fail_once
    yield
    assert tier._end_if_done == end


def jobs_of(worker: Any) -> dict[int, Any]:
    """The jobs of an OffloadingWorker, by their ids."""
    jobs: dict[int, Any] = worker._jobs
    return jobs


def replace_groups(worker: Any, replace: Callable[[Any], Any]) -> None:
    """Replace each group's mover of an OffloadingWorker."""
    worker._groups = [replace(group) for group in worker._groups]


def layers_of(worker: Any) -> Any:
    """What loads beside a forward, layer by layer."""
    return worker._layerwise


def serve_side(side: Any) -> None:
    """SGLang's hooks serve a rank, without a look at SGLang."""
    from flexkv_sglang import hooks

    hooks._side = side


def pending_offloads(side: Any) -> Collection[Any]:
    """Offloads of a rank of SGLang whose ends SGLang has not taken."""
    pending: Collection[Any] = side._pending
    return pending


def queued_loads(side: Any) -> Mapping[str, Any]:
    """Loads of a rank of SGLang that wait for a batch, by their requests."""
    queued: Mapping[str, Any] = side._queued
    return queued


def tracked_by_rank(side: Any) -> Mapping[str, Any]:
    """What the rank of SGLang that decides knows of requests, by their ids."""
    requests: Mapping[str, Any] = side.requests._by_id
    return requests


def awaited_fetch(side: Any, rid: str) -> Any:
    """What a rank of SGLang fetches for a request; None if it has no fetch."""
    return side.requests._by_id[rid].fetch if rid in side.requests._by_id else None


def kept_keys(pages: Any) -> int:
    """How many keys of SGLang's pages are kept."""
    count: int = pages._kept_keys
    return count


def kept_pages(events: Any) -> Collection[Any]:
    """Pages of SGLang that its KV events know."""
    pages: Collection[Any] = events._pages
    return pages


def trace_rank(side: Any, spans: Any) -> None:
    """A rank of SGLang reports what it does for requests."""
    side.requests.traced.spans = side.requests.waiting._fetches._spans = spans


def traced_transfers(work: Any) -> Collection[int]:
    """The transfers of which a span will be made."""
    running: Mapping[int, Any] = work._running
    return running
