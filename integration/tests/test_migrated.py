# SPDX-License-Identifier: Apache-2.0
"""Engines start with what `flexkv migrate` makes of configurations of LMCache and of vLLM's own
offloading, and load blocks.

The sizes of the published configurations are made smaller: host memory holds `WARM` and little
more, so that another tier has what left it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.harness.config import EngineConfig
from integration.harness.connector import Connector
from integration.harness.host import EngineHost
from integration.harness.mooncake_master import MooncakeMaster
from integration.tests.corpus import EVICTED, FLEXKV_BLOCK, WARM
from integration.tests.disks import PATIENT_SECONDS, gigabytes, restorable, restored
from integration.tests.nodes import ANSWER_SECONDS, Nodes, hits_by_tier, leave_host_memory, store
from integration.tests.reference import Reference
from integration.tests.steps import ask_each, whole_blocks

HOST_AND_DISK = """
chunk_size: 256
local_cpu: True
max_local_cpu_size: {memory}
local_disk: "file://{folder}/"
max_local_disk_size: 0.25
remote_url: null
use_layerwise: true
"""
MOONCAKE = """
chunk_size: 256
remote_url: "mooncakestore://{master}/"
remote_serde: "naive"
local_cpu: True
max_local_cpu_size: {memory}
extra_config:
  local_hostname: "localhost"
  metadata_server: "P2PHANDSHAKE"
  protocol: "tcp"
  device_name: ""
  master_server_address: "{master}"
  global_segment_size: 67108864
  local_buffer_size: 67108864
"""
OFFLOADING = """
args:
- |
  exec vllm serve MODEL --kv-transfer-config '{{"kv_connector":"OffloadingConnector",
    "kv_role":"kv_both","kv_connector_extra_config":{{"spec_name":"TieringOffloadingSpec",
    "cpu_bytes_to_use":134217728,"block_size":256,
    "secondary_tiers":[{{"type":"fs_python","root_dir":"{folder}","n_read_threads":16}}]}}}}'
"""

MEMORY = gigabytes(2 * sum(restorable(WARM)) // FLEXKV_BLOCK)
Migrate = Callable[[str], Connector]


@pytest.fixture
def migrate(tmp_path: Path, runtime_dir: Path) -> Migrate:
    """The connector that the command's output describes, started as its comments say."""

    def run(text: str) -> Connector:
        source, made = tmp_path / "lmcache.yaml", tmp_path / "flexkv.yaml"
        source.write_text(text)
        command = [sys.executable, "-m", "flexkv", "migrate", str(source)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        made.write_text(output)
        found = re.search("--kv-transfer-config '(.*)'", output)
        assert found is not None
        # What tests need, and users do not.
        own: dict[str, Any] = {
            "FLEXKV_CONFIG_PATH": made,
            "FLEXKV_RUNTIME_DIR": runtime_dir,
            "FLEXKV_ALWAYS_LOAD": 1,
            "FLEXKV_EVICTION_POLICY": "lru",
            "FLEXKV_SSD_TIMEOUT_SECONDS": PATIENT_SECONDS,
            "FLEXKV_BLOCK_TOKENS": FLEXKV_BLOCK,
            "FLEXKV_MOONCAKE_QUESTION_SECONDS": ANSWER_SECONDS,
            "FLEXKV_MOONCAKE_TIMEOUT_SECONDS": ANSWER_SECONDS,
        }
        environ = {name: str(value) for name, value in own.items()}
        return Connector("migrated", json.loads(found[1]), environ)

    return run


def test_host_memory_and_disk(
    host: EngineHost,
    reference: Reference,
    engine_config: Callable[..., EngineConfig],
    migrate: Migrate,
    tmp_path: Path,
) -> None:
    text = HOST_AND_DISK.format(folder=tmp_path / "disk", memory=MEMORY)
    engine = host.start(engine_config(migrate(text)))
    reference.check_all(WARM, ask_each(engine, WARM), what="cold")
    engine.forget()
    warm = ask_each(engine, WARM)
    reference.check_all(WARM, warm, what="from host memory")
    # vLLM computes the last token of a prompt that it loads by layers.
    loaded = [min(whole_blocks(len(prompt)), len(prompt) - 1) for prompt in WARM]
    assert restored(warm) == loaded
    assert hits_by_tier(engine) == {"host": sum(loaded)}
    leave_host_memory(engine, EVICTED[:6])
    warm = ask_each(engine, WARM)
    reference.check_all(WARM, warm, what="from disk")
    assert restored(warm) == loaded
    assert hits_by_tier(engine) == {"host": sum(loaded), "disk": sum(loaded)}


def test_mooncake_without_a_metadata_server(
    nodes: Nodes, reference: Reference, migrate: Migrate
) -> None:
    pytest.importorskip(
        "mooncake.store", reason="Mooncake Store is not installed", exc_type=ImportError
    )
    with MooncakeMaster(metadata=False) as master:
        text = MOONCAKE.format(master=master.settings["mooncake_master"], memory=MEMORY)
        engine = nodes.start_with(migrate(text))
        cold = store(engine, WARM, lambda: master.metric("key_count"))
        reference.check_all(WARM, cold, what="cold")
        leave_host_memory(engine, EVICTED[:6])
        found = ask_each(engine, WARM)
        reference.check_all(WARM, found, what="from Mooncake")
        assert restored(found) == restorable(WARM)
        assert hits_by_tier(engine) == {"mooncake": sum(restorable(WARM))}


def test_vllms_own_offloading_to_a_shared_folder(
    host: EngineHost,
    reference: Reference,
    engine_config: Callable[..., EngineConfig],
    migrate: Migrate,
    tmp_path: Path,
) -> None:
    pytest.importorskip("obstore")
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o700)
    config = engine_config(migrate(OFFLOADING.format(folder=folder)))
    engine = host.start(config)
    reference.check_all(WARM, ask_each(engine, WARM), what="cold")
    engine.forget()
    warm = ask_each(engine, WARM)
    reference.check_all(WARM, warm, what="from host memory")
    assert restored(warm) == restorable(WARM)
    assert any(folder.rglob("*")), "the blocks are in the folder"
