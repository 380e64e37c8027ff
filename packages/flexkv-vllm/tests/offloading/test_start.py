# SPDX-License-Identifier: Apache-2.0
"""What the offloading spec refuses at start, and what it tells vLLM's metrics and events."""

from __future__ import annotations

import importlib
import math
import random
import sys
from pathlib import Path
from typing import Any

import engine_world
import pytest
import torch
from engine_world import random_prompt
from kv_pages import BLOCK_TOKENS
from offloading_release import HYBRID
from offloading_world import MakeOffloadingWorld
from patience import wait_until
from prometheus_client import Counter, Gauge, Histogram
from subscriber import DISK, HOST, Subscriber
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    ReqContext,
)

import flexkv
from flexkv import ConfigError, EngineVersionError, LayoutError
from flexkv_vllm.compat.events import event_hash
from flexkv_vllm.offloading.start import describe_groups
from packages.inside import below_of, index_of
from packages.inside_adapters import set_idle_clock
from packages.tier_blocks import ready_blocks


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"settings": {"cpu_cache_gib": 1}}, ConfigError, ["'cpu_cache_gib'", "cpu_cache_gb"]),
        ({"settings": {"block_tokens": 64}}, ConfigError, ["block_tokens is 64", "block_size"]),
        ({"chunk": 2, "windows": (40,)}, ConfigError, ["blocks_per_chunk is 2", "allowed: 1"]),
        ({"settings": {"canonical_layout": True}}, ConfigError, ["'canonical_layout'"]),
    ],
    ids=["unknown key", "two block sizes", "chunks of a hybrid model", "another layout"],
)
def test_what_cannot_work_is_refused(
    make_offloading_world: MakeOffloadingWorld,
    options: dict[str, Any],
    error: type[Exception],
    words: list[str],
) -> None:
    with pytest.raises(error) as caught:
        make_offloading_world(**options)
    assert all(word in str(caught.value) for word in words)


def test_ranks_of_an_external_launcher_are_refused(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them would have a scheduler of its own."""
    make = engine_world.make_config

    def launched(*args: Any, **options: Any) -> Any:
        config = make(*args, **options)
        config.parallel_config.distributed_executor_backend = "external_launcher"
        return config

    monkeypatch.setattr(engine_world, "make_config", launched)
    with pytest.raises(LayoutError, match=r"external_launcher.*allowed: 'mp'"):
        make_offloading_world(ranks=2)
    assert make_offloading_world(ranks=1).manager


def test_beside_other_connectors_it_is_refused(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would not report to it which of their loads failed."""
    monkeypatch.setattr("flexkv_vllm.offloading.spec.is_made_by_another", lambda: True)
    with pytest.raises(ConfigError, match="FlexKVConnectorV1 inside MultiConnector"):
        make_offloading_world()


def test_block_tokens_that_agree_are_fine(make_offloading_world: MakeOffloadingWorld) -> None:
    assert make_offloading_world(chunk=2, settings={"block_tokens": 2 * BLOCK_TOKENS}).manager


def test_an_older_vllm_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("flexkv_vllm.offloading")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(ReqContext, "get_offload_key_position")
    with pytest.raises(EngineVersionError, match=r"allowed: 0\.31 to 0\.33, a newer"):
        importlib.import_module("flexkv_vllm.offloading")


def pages(*shape: int, dtype: torch.dtype = torch.int8) -> CanonicalKVCaches:
    tensor = torch.zeros(shape, dtype=dtype)
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, shape[1])], [[CanonicalKVCacheRef(0, 64)]]
    )


@pytest.mark.parametrize(
    "kv_caches",
    [
        CanonicalKVCaches([], [[]]),
        pages(8, 64, 2),
        pages(8, 64, dtype=torch.float16),
        pages(8, 32),
    ],
    ids=["no tensors", "three dimensions", "not bytes", "short rows"],
)
def test_pages_that_cannot_be_described(kv_caches: CanonicalKVCaches) -> None:
    with pytest.raises(LayoutError, match="allowed"):
        describe_groups(kv_caches)


@HYBRID
def test_events_say_what_can_be_loaded(
    make_offloading_world: MakeOffloadingWorld, windows: tuple[int, ...]
) -> None:
    world = make_offloading_world(slots=24, disk_slots=60, events=True, windows=windows)
    subscriber = Subscriber(world)
    rng = random.Random(1)
    for _ in range(8):
        world.generate(random_prompt(rng, 6 * BLOCK_TOKENS))
        world.settle()
    world.generate([1], max_tokens=1)  # a step more, which tells the last
    subscriber.listen()
    index = ready_blocks(index_of(world.cache))
    assert len(index) > 12
    assert subscriber.told[HOST] == {
        (int.from_bytes(key[-4:], "big"), event_hash(key[:-4])) for key in index
    }
    (drive,) = below_of(world.cache).tiers[0].drives
    assert len(subscriber.told[DISK]) == len(drive.index) > len(index)
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    world.generate([1], max_tokens=1)
    subscriber.listen()
    assert subscriber.told == {HOST: set(), DISK: set()}


def test_an_engine_at_rest_tells_all_events(
    make_offloading_world: MakeOffloadingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexkv.cache._CHANGES", 3)
    world = make_offloading_world(slots=24, disk_slots=60, events=True)
    subscriber = Subscriber(world)
    rng = random.Random(2)
    for _ in range(4):
        world.generate(random_prompt(rng, 6 * BLOCK_TOKENS))
        world.settle()
    set_idle_clock(world.manager, lambda: math.inf)

    def told_at_rest() -> dict[str, set[object]]:
        wait_until(lambda: not world.scheduler.has_requests(), world.step)
        subscriber.listen()
        return {medium: {name for _, name in told} for medium, told in subscriber.told.items()}

    (drive,) = below_of(world.cache).tiers[0].drives
    told = told_at_rest()
    assert told[HOST] == {event_hash(key[:-4]) for key in ready_blocks(index_of(world.cache))}
    assert len(told[HOST]) == len(told[DISK]) == len(drive.index) == 24
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    assert told_at_rest() == {HOST: set(), DISK: set()}


def test_metrics_are_those_of_flexkvs_own_connector(
    make_offloading_world: MakeOffloadingWorld, tmp_path: Path
) -> None:
    world = make_offloading_world(slots=14, disk_slots=60)
    rng = random.Random(2)
    for _ in range(4):
        world.generate(random_prompt(rng, 6 * BLOCK_TOKENS))
        world.settle()
    world.generate([1], max_tokens=1)
    types: Any = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    served = OffloadPromMetrics(world.vllm_config, types, ["engine"], {0: ["0"]})
    for stats in world.stats:
        served.observe(stats)
    counters = world.cache.counters
    values = {
        (name, labels): metric._value.get()
        for (_, name, labels), metric in served.offloading_metrics.items()
        if name.startswith("vllm:flexkv_") and not isinstance(metric, Histogram)
    }
    assert values["vllm:flexkv_stored_blocks", ("host",)] == counters.stored_blocks > 14
    assert values["vllm:flexkv_evicted_blocks", ("host",)] == counters.evicted_blocks > 0
    assert values["vllm:flexkv_capacity_blocks", ("host",)] == 14
    assert values["vllm:flexkv_capacity_bytes", ("host",)] == 14 * world.cache.info.slot_bytes
    ((labels, one),) = ((key[1], v) for key, v in values.items() if key[0] == "vllm:flexkv_info")
    assert one == 1
    assert labels[0] == flexkv.__version__
    assert values["vllm:flexkv_stored_blocks", ("disk",)] > 14
    (stores,) = (
        metric
        for (_, name, _), metric in served.offloading_metrics.items()
        if name == "vllm:flexkv_store_seconds"
    )
    assert sum(bucket.get() for bucket in stores._buckets) == counters.stores
