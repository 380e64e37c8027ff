# SPDX-License-Identifier: Apache-2.0
"""A tier that cannot be opened ends the start, and the tiers that were opened before it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="needs pip install 'flexkv[objects]'")

from sessions import led

from flexkv.eviction import POLICIES
from flexkv.eviction.policy import NO_GUARD
from flexkv.host.arena import ArenaSpec
from flexkv.layout import BlockFormat
from flexkv.open_tiers import open_tiers, policy_maker
from flexkv.session.state_reports import read_states
from flexkv.session.wire import SessionInfo
from flexkv.settings import CacheConfig
from flexkv.tiers.circuit import CircuitState
from flexkv.tiers.remote import RemoteTier
from flexkv.types.errors import StoreSettingError
from packages.conftest import PATIENCE_SECONDS


@pytest.fixture(autouse=True)
def plain_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that nobody allows to be read in plain text."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)


def test_the_disk_has_no_owner_after_a_bucket_was_refused(tmp_path: Path) -> None:
    disk = CacheConfig(ssd_cache_gb=1 / 1024, ssd_cache_dir=(str(tmp_path / "disk"),))
    both = dataclasses.replace(disk, objects_url="s3://bucket")
    with led(tmp_path / "run") as session:
        with pytest.raises(StoreSettingError):
            open_tiers(both, session.info, POLICIES["lru"])
        (attached,) = open_tiers(disk, session.info, POLICIES["lru"])
        assert attached.tier.figures.reads == {CircuitState.CLOSED: 1}
        assert attached.tier.close()


@pytest.mark.parametrize(
    ("setting", "follows", "directories", "policy"),
    [
        ("auto", True, 1, "hazard"),
        ("auto", False, 1, "lru"),
        ("lru", True, 1, "lru"),
        ("auto", True, 2, "hazard"),
    ],
)
def test_directories_evict_by_the_setting(
    tmp_path: Path, setting: str, follows: bool, directories: int, policy: str
) -> None:
    roots = tuple(str(tmp_path / f"disk{number}") for number in range(directories))
    config = CacheConfig(ssd_cache_gb=1 / 512, ssd_cache_dir=roots, eviction_policy=setting)
    with led(tmp_path / "run") as session:
        (attached,) = open_tiers(config, session.info, policy_maker(config, follows))
        figures = attached.tier.figures
        assert figures.policy == policy
        assert (figures.guard is not NO_GUARD) is (policy == "hazard")
        assert attached.tier.close()


def test_a_directory_that_is_not_open_is_shown_to_other_processes(tmp_path: Path) -> None:
    root = str(tmp_path / "disk")
    disk = CacheConfig(
        ssd_cache_gb=1 / 1024, ssd_cache_dir=(root,), runtime_dir=str(tmp_path / "run")
    )
    with led(tmp_path / "run") as session:
        (first,) = open_tiers(disk, session.info, POLICIES["lru"])
        (second,) = open_tiers(disk, session.info, POLICIES["lru"])
        (shown,) = read_states(disk.session_root)
        assert (shown["tier"], shown["store"], shown["pid"]) == ("disk", root, os.getpid())
        assert shown["reads"] == shown["writes"] == "connecting"
        assert first.tier.close()
        assert second.tier.close()
        assert read_states(disk.session_root) == []


def test_each_engine_of_a_server_has_a_folder_and_no_other_one_has(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    run = str(tmp_path / "run")
    disk = CacheConfig(ssd_cache_gb=1 / 1024, ssd_cache_dir=(str(root),), runtime_dir=run)
    with led(tmp_path / "run") as session:
        opened = [open_tiers(disk, session.info, POLICIES["lru"], engines=2)[0] for _ in range(3)]
        assert len(list(root.iterdir())) == 2
        (shown,) = read_states(disk.session_root)
        assert shown["writes"] == "connecting"
        own = dataclasses.replace(disk, ssd_in_use="own")
        opened += open_tiers(own, session.info, POLICIES["lru"], engines=2)
        assert len(list(root.iterdir())) == 3
        for each in opened:
            assert each.tier.close()


def test_mooncake_is_left_after_a_bucket_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mooncake", reason="needs pip install 'flexkv[mooncake]'")
    from integration.harness.mooncake_master import MooncakeMaster

    monkeypatch.setattr("flexkv.tiers.remote.OPEN_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr("flexkv.tiers.device.CLOSE_SECONDS", PATIENCE_SECONDS)
    closed: list[bool] = []
    close = RemoteTier.close

    def watched(tier: RemoteTier, flush_seconds: float = 0.0) -> bool:
        closed.append(close(tier, flush_seconds))
        return closed[-1]

    monkeypatch.setattr(RemoteTier, "close", watched)
    master = MooncakeMaster()
    try:
        config = CacheConfig(objects_url="s3://bucket", **master.settings)
        info = SessionInfo("fe" * 16, ArenaSpec(BlockFormat(1, (4096,)), 4))
        with pytest.raises(StoreSettingError):
            open_tiers(config, info, POLICIES["lru"])
    finally:
        master.kill()
    assert closed == [True]
