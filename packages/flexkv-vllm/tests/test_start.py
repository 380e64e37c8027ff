# SPDX-License-Identifier: Apache-2.0
"""What is refused at start, and that nothing is left behind by it."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from connector_rank import ConnectorRank, each_thread_is_a_worker
from engine_world import MakeWorld
from kv_pages import make_pages
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from world_config import PLUGIN, make_config, make_kv_cache_config

from flexkv import ArenaError, CacheConfig, ConfigError, EngineVersionError, LayoutError
from flexkv.engine.choice.chooser import LoadMode
from flexkv.tiers.disk.folder import claim
from flexkv_vllm.compat import core as compat
from flexkv_vllm.connector import FlexKVConnectorV1
from flexkv_vllm.groups import groups_of
from flexkv_vllm.settings import load_mode_of, steps_behind

BLOCKS = 8


@pytest.fixture
def vllm_config(tmp_path: Path) -> VllmConfig:
    config = make_config(
        tmp_path,
        1 << 20,
        ranks=1,
        entry=PLUGIN,
        block_tokens=16,
        budget=64,
        policy="recompute",
        max_requests=4,
    )
    config.cache_config.num_gpu_blocks = BLOCKS
    return config


@contextlib.contextmanager
def worker(
    vllm_config: VllmConfig,
    pages: dict[str, Any] | None = None,
    kv_cache_config: KVCacheConfig | None = None,
) -> Iterator[None]:
    """A worker, from its start to its end."""
    connector = FlexKVConnectorV1(
        vllm_config, KVConnectorRole.WORKER, kv_cache_config or make_kv_cache_config(BLOCKS)
    )
    pages = make_pages(BLOCKS) if pages is None else pages
    rank = ConnectorRank(0, 1, (), pages, connector=connector)
    try:
        with each_thread_is_a_worker():
            rank.register()
        yield
    finally:
        rank.shutdown()


def start(vllm_config: VllmConfig, pages: dict[str, Any] | None = None, **given: Any) -> None:
    """Start a worker, and end it."""
    with worker(vllm_config, pages, **given):
        pass


def start_scheduler(vllm_config: VllmConfig) -> None:
    FlexKVConnectorV1(vllm_config, KVConnectorRole.SCHEDULER, make_kv_cache_config(BLOCKS))


def extra(vllm_config: VllmConfig) -> dict[str, Any]:
    assert vllm_config.kv_transfer_config is not None
    return vllm_config.kv_transfer_config.kv_connector_extra_config


def sockets(vllm_config: VllmConfig) -> list[Path]:
    return list(Path(extra(vllm_config)["runtime_dir"]).glob("*.sock"))


def test_a_start_leaves_nothing_after_shutdown(vllm_config: VllmConfig) -> None:
    start(vllm_config)
    assert sockets(vllm_config) == []


def threads_named(name: str) -> list[int]:
    """The threads of this process with that name. Others may end meanwhile."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().strip() == name:
                found.append(int(task.name))
    return found


def test_copies_may_use_processors_that_the_worker_is_not_pinned_to(
    vllm_config: VllmConfig,
) -> None:
    allowed = os.sched_getaffinity(os.getppid())
    pinned = {min(allowed)}
    os.sched_setaffinity(0, pinned)
    try:
        with worker(vllm_config):
            assert os.sched_getaffinity(0) == pinned
            movers = threads_named("flexkv-mover")
            assert movers
            for thread in movers:
                assert os.sched_getaffinity(thread) == allowed
    finally:
        os.sched_setaffinity(0, allowed)


def test_unknown_key(vllm_config: VllmConfig) -> None:
    extra(vllm_config)["cpu_cache"] = 1
    with pytest.raises(ConfigError, match="'cpu_cache' in kv_connector_extra_config"):
        start(vllm_config)


def test_untested_version(vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.check_version, "__defaults__", ("0.19.0",))
    with pytest.raises(EngineVersionError, match=r"vLLM 0\.19\.0 is installed"):
        start(vllm_config)
    extra(vllm_config)["allow_untested_engine"] = True
    start(vllm_config)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_other_parallelism(vllm_config: VllmConfig, kind: str) -> None:
    setattr(vllm_config.parallel_config, f"{kind}_context_parallel_size", 2)
    with pytest.raises(LayoutError, match=f"--{kind}-context-parallel-size is 2; allowed: 1"):
        start(vllm_config)


def test_a_group_of_an_unknown_kind(vllm_config: VllmConfig) -> None:
    config = make_kv_cache_config(BLOCKS)
    cross = CrossAttentionSpec(block_size=16, num_kv_heads=4, head_size=16, dtype=torch.float32)
    config.kv_cache_groups.append(KVCacheGroupSpec(["layer2"], cross))
    with pytest.raises(LayoutError, match="a group of CrossAttentionSpec; allowed: full attention"):
        start(vllm_config, kv_cache_config=config)
    assert sockets(vllm_config) == []


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ({}, "registered no KV cache tensors"),
        ({"layer0": [torch.zeros(BLOCKS, 4)]}, "'layer0' is a list; allowed: one tensor per layer"),
        ({"layer0": torch.empty(BLOCKS, 4, device="meta")}, "on device meta; allowed: cpu"),
        ({"layer0": torch.zeros(3, 4)}, "no dimension that counts the engine's 8 blocks"),
        ({"layer0": torch.zeros(1, 4).expand(BLOCKS, 4)}, "repeats elements"),
    ],
)
def test_indescribable_pages(vllm_config: VllmConfig, pages: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        start(vllm_config, pages)
    assert sockets(vllm_config) == []


def test_block_tokens_that_do_not_fit_the_engine(vllm_config: VllmConfig) -> None:
    extra(vllm_config)["block_tokens"] = 24
    with pytest.raises(LayoutError, match=r"block_tokens is 24.*multiple of 16"):
        start(vllm_config)


def test_more_memory_than_there_is(vllm_config: VllmConfig) -> None:
    extra(vllm_config)["cpu_cache_gb"] = 1e5
    with pytest.raises(ArenaError, match=r"cpu_cache_gb is 100000 GiB; allowed: at most"):
        start(vllm_config)
    assert sockets(vllm_config) == []


def test_an_engine_id_in_use(vllm_config: VllmConfig) -> None:
    with (
        worker(vllm_config),
        pytest.raises(ArenaError, match="is owned by the living process"),
    ):
        start(vllm_config)
    start(vllm_config)


@pytest.mark.parametrize("mode", ["layerwise", "auto"])
def test_layer_by_layer_needs_steps_one_after_another(vllm_config: VllmConfig, mode: str) -> None:
    config = CacheConfig(load_mode=mode)
    groups = groups_of(vllm_config, None)
    vllm_config.scheduler_config.async_scheduling = False
    assert load_mode_of(config, vllm_config, groups) is LoadMode(mode)
    vllm_config.scheduler_config.async_scheduling = True
    with pytest.raises(ConfigError, match=f"load_mode is '{mode}'.*--no-async-scheduling"):
        load_mode_of(config, vllm_config, groups)
    vllm_config.scheduler_config.async_scheduling = False
    vllm_config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ConfigError, match=f"load_mode is '{mode}'.*--pipeline-parallel-size is 2"):
        load_mode_of(config, vllm_config, groups)


def test_a_scheduler_that_is_refused_leaves_disk_and_arena(
    vllm_config: VllmConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "blocks"
    extra(vllm_config).update(load_mode="layerwise", ssd_cache_dir=str(folder), ssd_cache_gb=1e-3)
    with worker(vllm_config):
        before = mapped_arenas()
        vllm_config.scheduler_config.async_scheduling = True
        with pytest.raises(ConfigError, match="load_mode is 'layerwise'") as raised:
            start_scheduler(vllm_config)
        assert mapped_arenas() <= before  # though the traceback keeps the arena's object
        (kept,) = folder.iterdir()
        claim(str(folder), kept.name, owners=1).release()
        del raised


def mapped_arenas() -> Counter[str]:
    """How often each arena is mapped in this process, by inode."""
    maps = Path("/proc/self/maps").read_text(encoding="ascii", errors="replace")
    return Counter(line.split()[4] for line in maps.splitlines() if "memfd:flexkv" in line)


def test_windows_are_loaded_before_they_are_computed_on(vllm_config: VllmConfig) -> None:
    kv_cache_config = make_kv_cache_config(BLOCKS, windows=(32,))
    groups = groups_of(vllm_config, kv_cache_config)
    config = CacheConfig(load_mode="layerwise")
    assert load_mode_of(config, vllm_config, groups) is LoadMode.ASYNC


def test_a_role_that_vllm_does_not_have(vllm_config: VllmConfig) -> None:
    assert vllm_config.kv_transfer_config is not None
    vllm_config.kv_transfer_config.kv_role = "kv_reader"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"'kv_reader'; allowed: kv_both, kv_producer, "):
        start(vllm_config)


def test_a_second_scheduler_of_an_engine_is_refused(make_world: MakeWorld) -> None:
    """It would hand out the same slots."""
    world = make_world()
    with pytest.raises(ArenaError, match="handed to scheduler process"):
        start_scheduler(world.vllm_config)
    prompt = list(range(100))
    world.generate(prompt)
    world.forget()
    assert world.external_tokens[world.generate(prompt)] == 96
    world.check_outputs()


@pytest.mark.parametrize(
    ("ahead", "stages", "steps"), [(False, 1, 1), (True, 1, 2), (False, 2, 2), (True, 4, 4)]
)
def test_steps_behind_a_load(vllm_config: VllmConfig, ahead: bool, stages: int, steps: int) -> None:
    vllm_config.scheduler_config.async_scheduling = ahead
    vllm_config.parallel_config.pipeline_parallel_size = stages
    assert steps_behind(vllm_config) == steps
