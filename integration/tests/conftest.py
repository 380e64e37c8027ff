# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests with real engines.

Each worker of pytest-xdist has folders and an ``EngineHost`` of its own, in which one engine lives
at a time. ``sharing`` decides which tests run on the same worker, and in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.harness import connector, golden_pytest
from integration.harness.checkpoint import TINY, write_checkpoint
from integration.harness.config import EngineConfig
from integration.harness.connector import Connector
from integration.harness.engine import Engine
from integration.harness.golden import process_ledger
from integration.harness.host import EngineHost
from integration.harness.plain_engine import PlainEngine
from integration.sglang import environment
from integration.tests import corpus, disks, sharing
from integration.tests.node_service import NodeService
from integration.tests.nodes import Nodes
from integration.tests.reference import Reference, plain_config

# Bytes of KV cache and of arena that hold all that one test stores, and little more.
KV_CACHE_BYTES = 64 << 20
ARENA_GB = 0.125


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", golden_pytest.MARKER)
    plugin = golden_pytest.GoldenPlugin(process_ledger(), Path(__file__).parent)
    config.pluginmanager.register(plugin, "golden")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in this hook, too
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test here, so that unit test runs can leave out what starts engines; sort them."""
    here = Path(__file__).parent
    ours = [item for item in items if item.path.is_relative_to(here)]
    others = [item for item in items if not item.path.is_relative_to(here)]
    for item in ours:
        item.add_marker(pytest.mark.engine)
    items[:] = sharing.in_turn(ours, others, two_at_a_time=hasattr(config, "workerinput"))


@pytest.fixture(scope="session")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where logs, the checkpoint and FlexKV's runtime files go."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def sglang() -> Path:
    """SGLang's Python. Where there is none, tests that need it are skipped, but not under nox."""
    try:
        return environment.python()
    except environment.EnvironmentMissingError as error:
        if environment.may_be_missing():
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def model(work_dir: Path) -> Path:
    """The tests' checkpoint."""
    return write_checkpoint(TINY, work_dir)


@pytest.fixture(scope="session")
def runtime_dir(work_dir: Path) -> Path:
    """FlexKV's ``runtime_dir``: nothing else puts files there."""
    return work_dir / "run"


@pytest.fixture(scope="session")
def host(work_dir: Path) -> Iterator[EngineHost]:
    """All engines come from here."""
    found = EngineHost(work_dir / "logs")
    yield found
    found.close()


@pytest.fixture(scope="session")
def reference(host: EngineHost, model: Path) -> Reference:
    """Plain vLLM's answers to the whole corpus."""
    return Reference.asked(PlainEngine(host.start, plain_config(model)))


@pytest.fixture(scope="session")
def flexkv(runtime_dir: Path) -> Callable[..., dict[str, Any]]:
    """FlexKV's settings for the tests; keywords change or add some."""

    def settings(**changes: Any) -> dict[str, Any]:
        base = {
            "cpu_cache_gb": ARENA_GB,
            "block_tokens": corpus.FLEXKV_BLOCK,
            "runtime_dir": str(runtime_dir),
            # What is a hit must not depend on how fast the machine is, or on what else it does.
            "always_load": True,
        }
        return base | changes

    return settings


@pytest.fixture(scope="session")
def engine_config(model: Path) -> Callable[..., EngineConfig]:
    """Engines of the tests: a connector, and keywords that change the rest."""

    def config(chosen: Connector, **changes: Any) -> EngineConfig:
        base: dict[str, Any] = {
            "model": model,
            "dtype": TINY.dtype,
            "connector": chosen,
            "block_size": corpus.ENGINE_BLOCK,
            "max_num_batched_tokens": corpus.BATCHED_TOKENS,
            "kv_cache_bytes": KV_CACHE_BYTES,
            "probe": True,
            "forked": True,
        }
        return EngineConfig(**(base | changes))

    return config


@pytest.fixture(scope="session")
def offloading(flexkv: Callable[..., dict[str, Any]]) -> Callable[..., Connector]:
    """FlexKV under OffloadingConnector; keywords change or add settings."""

    def made(**changes: Any) -> Connector:
        return connector.offloading(
            blocks_per_chunk=corpus.FLEXKV_BLOCK // corpus.ENGINE_BLOCK, **flexkv(**changes)
        )

    return made


@pytest.fixture(scope="session")
def disk_dir(work_dir: Path) -> Path:
    """The cache directory that most tests of the disk share."""
    return work_dir / "disk"


@pytest.fixture(scope="session")
def disk_config(
    flexkv: Callable[..., dict[str, Any]], engine_config: Callable[..., EngineConfig]
) -> Callable[..., EngineConfig]:
    """Engines with a small arena and a disk of so many slots; keywords change the rest of the
    engine."""

    def config(
        directory: Path,
        disk_slots: int = disks.ROOMY,
        in_use: str = "error",
        **changes: Any,
    ) -> EngineConfig:
        settings = disks.settings(directory, disk_slots) | {"ssd_in_use": in_use}
        return engine_config(connector.plugin(**flexkv(**settings)), **changes)

    return config


@pytest.fixture
def disk_engine(
    host: EngineHost,
    reference: Reference,
    disk_config: Callable[..., EngineConfig],
    disk_dir: Path,
) -> Engine:
    """The engine with a roomy disk that tests share; the disk may hold what others stored."""
    engine = host.get(disk_config(disk_dir))
    engine.forget()
    return engine


@pytest.fixture
def engine(
    host: EngineHost,
    reference: Reference,
    flexkv: Callable[..., dict[str, Any]],
    engine_config: Callable[..., EngineConfig],
) -> Engine:
    """The engine that most tests share: FlexKV as a plugin, with nothing cached anywhere."""
    engine = host.get(engine_config(connector.plugin(**flexkv())))
    engine.reset_prefix_cache(reset_connector=True)
    return engine


@pytest.fixture
def nodes(
    host: EngineHost,
    reference: Reference,
    tmp_path: Path,
    engine_config: Callable[..., EngineConfig],
    flexkv: Callable[..., dict[str, Any]],
) -> Iterator[Nodes]:
    """Engines that live at the same time. The test that uses them has no other engine."""
    host.close()
    with Nodes(tmp_path, engine_config, flexkv) as found:
        yield found


@pytest.fixture
def service(tmp_path: Path) -> Iterator[NodeService]:
    """`flexkv serve`."""
    made = NodeService(tmp_path)
    try:
        yield made
    finally:
        made.kill()
