# SPDX-License-Identifier: Apache-2.0
"""FlexKV behind vLLM's own connector, as vLLM makes it where the plugin is not loaded."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from connector_rank import ConnectorRank, each_thread_is_a_worker
from kv_pages import BLOCK_TOKENS, HEAD_BYTES, HEADS, make_pages
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import flexkv_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from world_config import IN_MULTI, IN_TREE, make_config, make_kv_cache_config

from flexkv import LayoutError

BLOCKS = 8
ENTRIES = pytest.mark.parametrize("entry", [IN_TREE, IN_MULTI], ids=["alone", "in-multi"])


def config_of(directory: Path, entry: str, **settings: object) -> VllmConfig:
    config = make_config(
        directory,
        1 << 20,
        ranks=1,
        entry=entry,
        block_tokens=BLOCK_TOKENS,
        budget=64,
        policy="recompute",
        max_requests=4,
        settings=settings,
    )
    config.cache_config.num_gpu_blocks = BLOCKS
    return config


def one_group(spec: type, block_tokens: int = BLOCK_TOKENS, **more: object) -> KVCacheConfig:
    made = spec(
        block_size=block_tokens,
        num_kv_heads=HEADS,
        head_size=HEAD_BYTES // 2,
        dtype=torch.int8,
        **more,
    )
    config = make_kv_cache_config(BLOCKS)
    (group,) = config.kv_cache_groups
    config.kv_cache_groups[0] = KVCacheGroupSpec(group.layer_names, made)
    return config


def start(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Start a worker, and end it."""
    connector = KVConnectorFactory.create_connector(
        vllm_config, KVConnectorRole.WORKER, kv_cache_config
    )
    rank = ConnectorRank(0, 1, (), make_pages(BLOCKS), connector=connector)
    with contextlib.ExitStack() as stack:
        stack.callback(rank.shutdown)
        stack.enter_context(each_thread_is_a_worker())
        rank.register()


@ENTRIES
def test_a_model_of_sliding_windows_alone_is_refused(tmp_path: Path, entry: str) -> None:
    """vLLM would not learn which request's load failed, and compute on without it."""
    config = config_of(tmp_path, entry)
    said = r"groups \(a sliding window, 16 tokens\) .* let vLLM load the plugin 'flexkv'"
    with pytest.raises(LayoutError, match=said):
        start(config, one_group(SlidingWindowSpec, sliding_window=100))
    start(config, one_group(FullAttentionSpec))


@ENTRIES
def test_blocks_of_another_size_than_the_schedulers_are_refused(tmp_path: Path, entry: str) -> None:
    said = r"groups \(full attention, 32 tokens\) .* full attention in blocks of 16 tokens"
    with pytest.raises(LayoutError, match=said):
        start(config_of(tmp_path, entry), one_group(FullAttentionSpec, 32))


@ENTRIES
def test_what_is_turned_off_refuses_nothing(tmp_path: Path, entry: str) -> None:
    config = config_of(tmp_path, entry, enable=False)
    start(config, one_group(SlidingWindowSpec, sliding_window=100))


@ENTRIES
def test_vllm_is_told_that_nothing_is_delivered(
    tmp_path: Path, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it begins requests that it preempts again and again."""
    theirs = flexkv_connector.FlexKVConnectorV1
    monkeypatch.setattr(theirs, "requires_kv_delivery", True, raising=False)
    config = config_of(tmp_path, entry, enable=False)
    connector: Any = KVConnectorFactory.create_connector(
        config, KVConnectorRole.SCHEDULER, make_kv_cache_config(BLOCKS)
    )
    assert connector.requires_kv_delivery is False
