# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from vllm.config import PoolerConfig, VllmConfig
from vllm.v1.outputs import ModelRunnerOutput
from world_config import PLUGIN, make_config

from flexkv import LayoutError
from flexkv.engine.scheduler.groups import Group, Groups, Reach
from flexkv_vllm.compat.core import passes_stages_on
from flexkv_vllm.connector import FlexKVConnectorV1
from flexkv_vllm.settings import read_settings
from flexkv_vllm.support import check_parallelism, check_stages

STAGES = pytest.mark.skipif(not passes_stages_on(), reason="refused with this vLLM")


def config_of(directory: Path, *, guesses: bool = False, **sizes: int) -> VllmConfig:
    return make_config(
        directory,
        1 << 20,
        entry=PLUGIN,
        block_tokens=16,
        budget=64,
        policy="recompute",
        max_requests=4,
        guesses=guesses,
        **({"ranks": 1} | sizes),
    )


@pytest.mark.parametrize(
    ("launcher", "ranks", "stages", "served"),
    [
        ("external_launcher", 2, 1, False),
        pytest.param("external_launcher", 1, 2, False, marks=STAGES),
        ("external_launcher", 1, 1, True),
        pytest.param("mp", 2, 2, True, marks=STAGES),
        ("ray", 2, 1, True),
    ],
)
def test_each_model_has_one_scheduler(
    tmp_path: Path, launcher: str, ranks: int, stages: int, served: bool
) -> None:
    config = config_of(tmp_path, ranks=ranks, stages=stages)
    config.parallel_config.distributed_executor_backend = launcher
    if served:
        check_parallelism(config)
        return
    with pytest.raises(LayoutError, match=r"external_launcher.*2 ranks.*allowed: 'mp'"):
        check_parallelism(config)


def test_stages_must_be_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ModelRunnerOutput, "with_kv_conn_output_only", raising=False)
    check_parallelism(config_of(tmp_path, ranks=2))
    with pytest.raises(LayoutError, match=r"--pipeline-parallel-size is 2.*a newer vLLM"):
        check_parallelism(config_of(tmp_path, stages=2))


@STAGES
def test_stages_store_nothing_of_speculative_decoding(tmp_path: Path) -> None:
    check_parallelism(config_of(tmp_path, guesses=True))
    with pytest.raises(
        LayoutError, match="--pipeline-parallel-size is 2 with speculative decoding"
    ):
        check_parallelism(config_of(tmp_path, guesses=True, stages=2))


@pytest.mark.parametrize("reach", Reach)
def test_stages_hold_no_recurrent_states(tmp_path: Path, reach: Reach) -> None:
    groups = Groups((Group(0, Reach.ALL, 0, 16, 1), Group(1, reach, 32, 16, 1)), 16)
    check_stages(config_of(tmp_path), groups)
    if reach is not Reach.STATE:
        check_stages(config_of(tmp_path, stages=2), groups)
        return
    with pytest.raises(LayoutError, match=r"--pipeline-parallel-size is 2 .*recurrent states"):
        check_stages(config_of(tmp_path, stages=2), groups)


@pytest.mark.parametrize(("pooling", "served"), [("MEAN", False), ("CLS", False), ("LAST", True)])
def test_models_that_pool_a_whole_prompt_are_refused(
    tmp_path: Path, pooling: str, served: bool
) -> None:
    """vLLM's pooler raises for a prompt that is computed behind a hit, which ends the worker."""
    config = config_of(tmp_path)
    config.model_config.pooler_config = PoolerConfig(pooling_type=pooling)
    if served:
        read_settings(config, FlexKVConnectorV1)
        return
    with pytest.raises(LayoutError, match=f"{pooling}.*allowed: .*LAST"):
        read_settings(config, FlexKVConnectorV1)
