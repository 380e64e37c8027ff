# SPDX-License-Identifier: Apache-2.0
"""FlexKV's disks below vLLM's own CPU memory: vLLM's real manager of tiers decides, and every byte
that it may load is checked. vLLM's workers need a GPU; the tests write and read their part."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_pages import BLOCK_TOKENS
from patience import wait_until
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from world_config import OFFLOADING, make_config, make_kv_cache_config

from flexkv import ConfigError, LayoutError
from flexkv.tiers.remote import RemoteTier
from flexkv_vllm.offloading import tier
from flexkv_vllm.offloading.tier import FlexKVTier
from packages.inside_adapters import (
    change_weights,
    failures_of,
    keep_at_resets,
    lose_job,
    tiers_of,
)
from packages.line_errors import LineErrors

STEP = ScheduleEndContext((), ())


class Tiering:
    """vLLM's `OffloadingConnector` with its own memory and FlexKV below."""

    def __init__(self, folder: Path, chunks: int = 8, **settings: Any) -> None:
        entry = {
            "type": "FlexKVTier",
            "module_path": "flexkv_vllm.offloading.tier",
            "ssd_cache_dir": [str(folder / "disk")],
            "ssd_cache_gb": 0.01,
        }
        entry |= {"runtime_dir": str(folder), **settings}
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": chunks * 4096,
            "secondary_tiers": [{name: each for name, each in entry.items() if each is not None}],
        }
        config: Any = make_config(
            folder,
            1 << 20,
            ranks=1,
            entry=OFFLOADING,
            block_tokens=BLOCK_TOKENS,
            budget=256,
            policy="recompute",
            max_requests=8,
        )
        config.kv_transfer_config.kv_connector_extra_config = extra
        groups = make_kv_cache_config(32)
        self.connector = OffloadingConnector(config, KVConnectorRole.SCHEDULER, groups)
        self.manager: Any = self.connector.scheduler.manager
        self.tier: FlexKVTier = self.manager.secondary_tiers[0]
        view = self.manager.primary_tier.get_kv_memoryview()
        self.memory = np.asarray(view).view(np.uint8)
        self.contents: dict[OffloadKey, bytes] = {}
        self.requests = 0

    def begin(self, keys: list[OffloadKey]) -> ReqContext:
        self.requests += 1
        context = ReqContext(f"r{self.requests}")
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (at + 1))
        self.manager.on_new_request(context)
        return context

    def end(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)

    def store(self, keys: list[OffloadKey]) -> None:
        """As if a request had computed these blocks."""
        context = self.begin(keys)
        output = self.manager.prepare_store(keys, context)
        for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            self.memory[chunk] = np.frombuffer(self.contents[key], np.uint8)
        if output.keys_to_store:
            self.manager.complete_store(set(output.keys_to_store), context)
        self.settle()
        self.end(context)

    def settle(self) -> None:
        wait_until(lambda: not self.manager.has_pending_work(), self.step)

    def step(self) -> None:
        self.manager.on_schedule_end(STEP)

    def load(self, keys: list[OffloadKey]) -> int:
        """How many of the blocks a request finds; their bytes are right."""
        context, results = self.begin(keys), list[LookupResult]()

        def look_up() -> None:
            results[:] = [self.manager.lookup(key, context) for key in keys]
            self.step()

        waiting = {LookupResult.RETRY, LookupResult.HIT_PENDING}
        look_up()
        wait_until(lambda: not waiting.intersection(results), look_up)
        found = [k for k, r in zip(keys, results, strict=True) if r is LookupResult.HIT]
        if found:
            spec = self.manager.prepare_load(found, context)
            for key, chunk in zip(found, spec.chunk_ids, strict=True):
                assert bytes(self.memory[chunk]) == self.contents[key], "a wrong byte"
            self.manager.complete_load(found, context)
        self.end(context)
        return len(found)

    def blocks(self, count: int, seed: int) -> list[OffloadKey]:
        rng = random.Random(seed)
        keys = [make_offload_key(rng.randbytes(32), 0) for _ in range(count)]
        self.contents |= {key: rng.randbytes(self.memory.shape[1]) for key in keys}
        return keys

    def close(self) -> None:
        self.connector.shutdown()


MakeTiering = Callable[..., Tiering]


@pytest.fixture
def make_tiering(tmp_path: Path) -> Iterator[MakeTiering]:
    made: list[Tiering] = []

    def make(**settings: Any) -> Tiering:
        made.append(Tiering(tmp_path, **settings))
        return made[-1]

    yield make
    for each in made:
        if tiers_of(each.tier):
            each.close()


def over_a_bucket(make_tiering: MakeTiering, folder: Path) -> Tiering:
    pytest.importorskip("obstore")
    (folder / "bucket").mkdir(mode=0o700)
    settings = {"objects_url": f"file://{folder}/bucket", "ssd_cache_gb": None}
    return make_tiering(ssd_cache_dir=None, **settings)


def test_what_left_vllms_memory_comes_back(make_tiering: MakeTiering) -> None:
    tiering = make_tiering()
    prompts = [tiering.blocks(4, seed) for seed in range(6)]
    for keys in prompts:
        tiering.store(keys)
    assert [tiering.load(keys) for keys in prompts] == [4] * 6
    assert tiering.load(tiering.blocks(2, 9)) == 0


def test_blocks_are_found_after_a_restart(make_tiering: MakeTiering) -> None:
    first = make_tiering()
    keys = first.blocks(4, 1)
    first.store(keys)
    first.close()
    again = make_tiering()
    again.contents = first.contents
    assert again.load(keys) == 4


def test_a_damaged_block_is_computed(make_tiering: MakeTiering, tmp_path: Path) -> None:
    tiering = make_tiering()
    keys, others = tiering.blocks(4, 1), tiering.blocks(8, 2)
    tiering.store(keys)
    tiering.store(others)
    for slab in (tmp_path / "disk").glob("*/slab-*"):
        slab.write_bytes(bytes(0xFF ^ byte for byte in slab.read_bytes()))
    assert tiering.load(keys) == 0


@pytest.mark.parametrize("change", ["a reset", "other weights", "a pause"])
def test_old_blocks_are_not_found(
    make_tiering: MakeTiering, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    tiering = make_tiering()
    keys = tiering.blocks(4, 1)
    tiering.store(keys)
    if change == "other weights":
        change_weights(tiering.tier)
    if change == "a pause":
        keep_at_resets(monkeypatch, tiering.tier)
    assert tiering.connector.reset_cache()
    assert tiering.load(keys) == (4 if change == "a pause" else 0)
    tiering.store(keys)
    assert tiering.load(keys) == 4


def test_a_bucket_is_queried(make_tiering: MakeTiering, tmp_path: Path) -> None:
    tiering = over_a_bucket(make_tiering, tmp_path)
    prompts = [tiering.blocks(4, seed) for seed in range(4)]
    for keys in prompts:
        tiering.store(keys)
    assert [tiering.load(keys) for keys in prompts] == [4] * 4
    assert tiering.load(tiering.blocks(2, 9)) == 0


def test_an_error_ends_each_job_once(make_tiering: MakeTiering) -> None:
    tiering = make_tiering()
    keys, others = tiering.blocks(4, 1), tiering.blocks(4, 2)
    with lose_job(tiering.tier):
        tiering.store(keys)
    tiering.store(others)
    assert tiering.load(others) == 4
    tiering.store(tiering.blocks(8, 3))
    assert tiering.load(keys) == 0


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"ssd_cache_gb": None, "ssd_cache_dir": None}, ConfigError, "neither ssd_cache_gb"),
        ({"max_age_seconds": 60}, ConfigError, "max_age_seconds is 60, and vLLM keeps"),
        ({"ssd_cach_gb": 1}, ConfigError, "unknown key 'ssd_cach_gb' in secondary_tiers"),
    ],
)
def test_what_cannot_work_is_refused(
    make_tiering: MakeTiering, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_tiering(**settings)


def test_settings_without_effect_are_named(
    make_tiering: MakeTiering, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiering(ssd_admission="second_hit", pin_seconds=5)
    assert "ssd_admission, pin_seconds: set, but without effect" in caplog.text


def test_blocks_that_mean_nothing_elsewhere_are_refused(
    make_tiering: MakeTiering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexkv_vllm.offloading.start_tier.is_durable", lambda _: False)
    with pytest.raises(LayoutError, match="allowed: weights in files"):
        make_tiering()


UNGUARDED = {
    "<dictcomp>",
    "__init__",
    "_fail",
    "get_finished_jobs",
    "has_pending_work",
    "lookup",
    "on_new_request",
    "on_request_finished",
}
"""Parts of a `FlexKVTier` that call nothing which may fail, but what has a guard."""


@pytest.mark.parametrize("below", ["disk", "bucket"])
def test_an_error_before_any_line_reaches_no_step(
    make_tiering: MakeTiering, tmp_path: Path, below: str
) -> None:
    tiering = make_tiering() if below == "disk" else over_a_bucket(make_tiering, tmp_path)
    rng = random.Random(1)
    errors = LineErrors(
        [Path(tier.__file__)],
        lambda _, name: name in UNGUARDED,
        spares_now=lambda: rng.random() < 0.6,
        every_line=True,
    )
    step = tiering.step

    def armed_step() -> None:
        errors.arm()
        step()

    tiering.step = armed_step  # type: ignore[method-assign]
    prompts = [tiering.blocks(4, seed) for seed in range(6)]
    try:
        quiet = 0
        while quiet < 3:
            before = len(errors.hit)
            for keys in rng.sample(prompts, 3):
                errors.arm()
                if tiering.load(keys) < len(keys):
                    errors.arm()
                    tiering.store(keys)
            quiet = quiet + 1 if len(errors.hit) == before else 0
    finally:
        errors.disarm()
    tiering.step = step  # type: ignore[method-assign]
    assert len(errors.hit) > 50
    assert not tiering.manager.has_pending_work()
    for keys in prompts:
        tiering.store(keys)
    assert [tiering.load(keys) for keys in prompts] == [4] * 6


def test_a_request_waits_for_a_silent_store_until_its_deadline(
    make_tiering: MakeTiering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiering = over_a_bucket(make_tiering, tmp_path)
    keys = tiering.blocks(4, 1)
    tiering.store(keys)
    tiering.store(tiering.blocks(8, 2))
    with monkeypatch.context() as patch:
        patch.setattr(RemoteTier, "drain_answers", lambda _: [])
        assert tiering.load(keys) == 0
    assert tiering.load(keys) == 4


def test_an_answer_of_before_a_reset_is_no_error(
    make_tiering: MakeTiering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiering = over_a_bucket(make_tiering, tmp_path)
    keys = tiering.blocks(4, 1)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteTier, "drain_answers", lambda _: [])
        context = tiering.begin(keys)
        tiering.manager.lookup(keys[0], context)
        tiering.step()
        change_weights(tiering.tier)
    tiering.settle()
    assert failures_of(tiering.tier) == {}
