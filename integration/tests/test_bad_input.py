# SPDX-License-Identifier: Apache-2.0
"""Bad input stops the engine at start, with one clear line and nothing left behind.

Most of these starts are those of vLLM's engine core in one process. A whole engine shows that the
line reaches the user from its worker.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.harness import connector, processes
from integration.harness.config import EngineConfig
from integration.harness.connector import Connector
from integration.harness.engine import START_TIMEOUT, Engine
from integration.harness.host import EngineHost
from integration.harness.vllm_forks import fork_server
from integration.tests import disks, launched_rank
from integration.tests.corpus import WARM
from integration.tests.reference import Reference
from integration.tests.steps import ask_each, forked_refusal, refusal


@pytest.fixture
def refuse(
    engine_config: Callable[..., EngineConfig], tmp_path: Path
) -> Callable[[Connector], str]:
    """Start an engine core that must not start; what FlexKV says."""
    config = functools.partial(engine_config, probe=False)
    return lambda chosen: forked_refusal(config(chosen), tmp_path / "refused.log")


@pytest.mark.parametrize(
    ("settings", "said", "allowed"),
    [
        pytest.param(
            {"cpu_cash_gb": 1},
            ["'cpu_cash_gb'", "kv_connector_extra_config", "did you mean 'cpu_cache_gb'"],
            "names of settings",
            id="unknown key",
        ),
        pytest.param(
            {"cpu_cache_gb": -1},
            ["-1", "kv_connector_extra_config", "cpu_cache_gb"],
            "a number from",
            id="negative size",
        ),
        pytest.param(
            {"cpu_cache_gb": "lots"},
            ["'lots'", "kv_connector_extra_config", "cpu_cache_gb"],
            "a number from",
            id="size that is no number",
        ),
        pytest.param(
            {"cpu_cache_gb": 1e6},
            ["cpu_cache_gb", "1000000 GiB"],
            "this machine and its control groups have",
            id="more than the machine has",
        ),
        pytest.param(
            {"block_tokens": 48},
            ["block_tokens", "48"],
            "multiple",
            id="block that does not fit the engine's",
        ),
        pytest.param(
            {"ssd_cache_gb": 1},
            ["ssd_cache_gb is 1 from key", "kv_connector_extra_config", "ssd_cache_dir is not"],
            "both set, or neither",
            id="disk space without a directory",
        ),
        pytest.param(
            {"ssd_cache_gb": 1, "ssd_cache_dir": "cache"},
            ["'cache'", "kv_connector_extra_config", "ssd_cache_dir"],
            "absolute paths",
            id="cache directory with a relative path",
        ),
    ],
)
def test_bad_settings(
    refuse: Callable[[Connector], str],
    flexkv: Callable[..., dict[str, Any]],
    settings: dict[str, Any],
    said: list[str],
    allowed: str,
) -> None:
    message = refuse(connector.plugin(**flexkv(**settings)))
    assert [phrase for phrase in said if phrase not in message] == [], message
    assert allowed in message.partition("allowed:")[2], message


def test_an_unwritable_runtime_dir(
    refuse: Callable[[Connector], str], flexkv: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    # Below a file: not even root can make a directory there.
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "run")
    message = refuse(connector.plugin(**flexkv(runtime_dir=folder)))
    assert folder in message
    assert "runtime_dir" in message
    assert "can create and write" in message.partition("allowed:")[2], message


def test_an_unwritable_cache_directory(
    refuse: Callable[[Connector], str], flexkv: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cache"
    message = refuse(connector.plugin(**flexkv(**disks.settings(folder))))
    assert str(folder) in message
    assert "ssd_cache_dir" in message
    assert "can create and write" in message.partition("allowed:")[2], message


def test_more_than_the_disk_has(
    refuse: Callable[[Connector], str], flexkv: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Neither blocks nor files are left of what could not be had."""
    settings = disks.settings(tmp_path / "cache") | {"ssd_cache_gb": 1e6}
    message = refuse(connector.plugin(**flexkv(**settings)))
    assert str(tmp_path / "cache") in message
    assert "ssd_cache_gb" in message
    assert "a size that fits" in message.partition("allowed:")[2], message
    assert disks.slab_files(tmp_path / "cache") == []


def test_the_same_engine_id_twice(
    engine: Engine,
    reference: Reference,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
    work_dir: Path,
) -> None:
    """The second engine stops; the first one goes on."""
    (name,) = set(re.findall(r"and engine_id: (\S+)", engine.log()))
    config = engine_config(connector.plugin(engine_id=name, **flexkv()))
    said = refusal(lambda: Engine(config, work_dir / "logs" / "second.log"))
    assert repr(name) in said
    assert "engine_id of its own" in said.partition("allowed:")[2]

    reference.check_all(WARM, ask_each(engine, WARM), what="the first engine")
    engine.forget()
    warm = ask_each(engine, WARM)
    reference.check_all(WARM, warm, what="the first engine, warm")
    assert all(answer.cached_tokens for answer in warm)


def test_ranks_that_an_external_launcher_starts(
    host: EngineHost,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
    tmp_path: Path,
) -> None:
    """Each would have a scheduler of its own. As torchrun starts them."""
    host.close()
    config = engine_config(
        connector.plugin(engine_id="launched", **flexkv()),
        tensor_parallel_size=2,
        probe=False,
        extra_args={"distributed_executor_backend": "external_launcher"},
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with contextlib.ExitStack() as stack:
        groups = []
        for rank in range(2):
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            env = config.environment() | meeting | numbers
            with (tmp_path / f"{rank}.log").open("wb") as log:
                process = fork_server().run(
                    launched_rank.__name__, env, log.fileno(), [json.dumps(config.engine_args())]
                )
            groups.append(process.pid)
            stack.callback(processes.kill_group, process.pid)
        for rank, group in enumerate(groups):
            assert processes.wait_until_gone(group, START_TIMEOUT) == []
            said = (tmp_path / f"{rank}.log").read_text()
            assert launched_rank.STARTED not in said
            assert "'external_launcher' with 2 ranks" in said
            assert "allowed: 'mp' or 'ray'" in said
