# SPDX-License-Identifier: Apache-2.0
"""The sizes of pools, from a file and from what is left."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexkv.service import attach as attaching
from flexkv.service import attached
from flexkv.service.pool_sizes import (
    NoRoomError,
    PoolSize,
    PoolSizes,
    read_pools,
    sizes_of_settings,
)
from flexkv.session.wire import SessionInfo
from flexkv.settings import GIB, CacheConfig
from flexkv.types.errors import ArenaError, ConfigError
from packages.flexkv.tests.service.served import (
    ABOUT,
    ENGINE,
    FORMAT,
    OTHER,
    Scheduler,
    Service,
    attached_again,
    keys_of,
    until,
)

Attach = Callable[..., Scheduler]
MakeService = Callable[..., Service]

SLOT = FORMAT.slot_bytes / GIB
THIRD, FOURTH = (SessionInfo(name, OTHER.spec) for name in ("third", "fourth"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """Writes the file, and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "service.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def disk(tmp_path: Path) -> CacheConfig:
    """Settings with a disk."""
    return CacheConfig(ssd_cache_gb=100, ssd_cache_dir=(str(tmp_path),), cpu_cache_gb=8)


def test_entries_take_what_they_lack_from_the_default_and_that_from_the_settings(
    write: Callable[[str], str], disk: CacheConfig
) -> None:
    text = "pools: [{model: a, cpu_cache_gb: 4}, {model: b, ssd_cache_gb: 0}]\n"
    file = read_pools(write(text + "default: {cpu_cache_gb: 2}\n"), disk)
    assert file.named == {"a": PoolSize(4, 100), "b": PoolSize(2, None)}
    assert (file.other, file.total) == (PoolSize(2, 100), PoolSize())
    assert read_pools(write("{}"), disk).other == sizes_of_settings(disk).other == PoolSize(8, 100)
    assert read_pools(write(""), disk).named == {}
    shares = "pools: [{model: a, tenant_shares: {x: 40}}]\ndefault: {tenant_shares: y=10}"
    file = read_pools(write(shares), replace(disk, tenant_shares=(("z", 5.0),)))
    assert file.named["a"].shares == (("x", 40.0),)
    assert file.other.shares == (("y", 10.0),)
    assert file.named["a"].applied(disk).tenant_shares == (("x", 40.0),)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("pool: []", r"unknown key 'pool' in .*yaml; allowed: total, pools, default"),
        ("pools: {}", r"\{\} from pools in .*yaml is not allowed; allowed: a list"),
        ("pools: [a]", r"'a' from pools\[0\] in .*; allowed: a mapping"),
        ("pools: [{cpu_cache_gb: 1}]", r"None from pools\[0\].model in .*; allowed: the name"),
        ("pools: [{model: a}, {model: a}]", r"'a' from pools\[1\].model in .*each model once"),
        (
            "pools: [{model: a, cpu_cache_gb: x}]",
            r"'x' from pools\[0\].cpu_cache_gb in .*yaml is not a valid cpu_cache_gb; allowed: ",
        ),
        (
            "default: {gb: 1}",
            r"unknown key 'gb' of default in .*; allowed: tenant_shares, cpu_cache_gb, ssd_",
        ),
        (
            "pools: [{model: a, tenant_shares: {x: 140}}]",
            r"\{'x': 140\} from pools\[0\].tenant_shares in .*yaml is not a valid tenant_shares",
        ),
        ("total: {tenant_shares: a=1}", r"unknown key 'tenant_shares' of total in"),
        ("default: 4", r"4 from default in .*; allowed: a mapping with cpu_cache_gb and ssd_"),
        ("total: {ssd_cache_gb: 4}", r"total.ssd_cache_gb is 4 in .*, but ssd_cache_dir is not"),
        ("[]", r"service.yaml from --pools holds a list; allowed: a YAML or JSON file"),
        ("{", r"service.yaml from --pools cannot be parsed"),
        (
            "pools: [{model: a, cpu_cache_gb: 3}]\ntotal: {cpu_cache_gb: 2}",
            r"the entries of pools in .* have 3 GiB of cpu_cache_gb together, and total.* is 2",
        ),
        (
            "pools: [{model: a}]\ntotal: {cpu_cache_gb: 2}",
            r"the entry of 'a' in .*yaml has no cpu_cache_gb, but total.cpu_cache_gb is set",
        ),
    ],
)
def test_wrong_files_are_refused(write: Callable[[str], str], text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read_pools(write(text), CacheConfig())


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none from --pools"):
        read_pools(str(tmp_path / "none"), CacheConfig())


def test_others_share_what_the_entries_leave(write: Callable[[str], str]) -> None:
    text = """
    total: {cpu_cache_gb: 10}
    pools: [{model: a, cpu_cache_gb: 4}]
    default: {cpu_cache_gb: 4}
    """
    sizes = PoolSizes(read_pools(write(text), CacheConfig()))
    assert sizes.take(1, "x", 1).memory == 4
    assert sizes.take(2, "y", 1).memory == 2, "the rest; a's part is kept for it"
    with pytest.raises(NoRoomError, match=r"all 10 GiB of total.cpu_cache_gb in .*model 'z'"):
        sizes.take(3, "z", 1)
    assert sizes.take(4, "a", 1).memory == 4
    assert sizes.is_named(4)
    assert not sizes.is_named(1)
    sizes.give_back(1)
    assert sizes.take(5, "a", 1).memory == 4, "a second pool of a model counts as one of others"
    with pytest.raises(NoRoomError):
        sizes.take(6, "z", 1)


def test_without_a_default_size_one_takes_all_that_is_left(write: Callable[[str], str]) -> None:
    sizes = PoolSizes(read_pools(write("total: {cpu_cache_gb: 10}"), CacheConfig()))
    assert sizes.take(1, "x", 1).memory == 10
    with pytest.raises(NoRoomError):
        sizes.take(2, "y", 1)


def test_a_rest_of_less_than_a_block_is_nothing(
    write: Callable[[str], str], disk: CacheConfig
) -> None:
    text = "total: {cpu_cache_gb: 5, ssd_cache_gb: 150}\ndefault: {cpu_cache_gb: 2}"
    sizes = PoolSizes(read_pools(write(text), disk))
    assert sizes.take(1, "x", 1) == PoolSize(2, 100)
    assert sizes.take(2, "y", 1) == PoolSize(2, 50)
    assert sizes.take(3, "z", 1) == PoolSize(1, None), "no room on disk"
    with pytest.raises(NoRoomError):
        sizes.take(4, "z", 1)
    sizes.give_back(3)
    with pytest.raises(NoRoomError):
        sizes.take(4, "z", GIB + 1)


def test_pools_that_engines_hand_back_count_with_what_they_have(
    write: Callable[[str], str],
) -> None:
    text = "total: {cpu_cache_gb: 10}\npools: [{model: a, cpu_cache_gb: 4}]\n"
    sizes = PoolSizes(read_pools(write(text), CacheConfig(cpu_cache_gb=3)))
    assert sizes.resume(1, "a", 9.0) == (PoolSize(9), 4)
    assert sizes.resume(2, "x", 5.0) == (PoolSize(5), 3)
    assert sizes.take(3, "y", 1).memory == 1
    sizes.give_back(2)
    assert sizes.take(4, "y", 1).memory == 3


def test_each_pool_has_the_size_of_its_model(
    make_service: MakeService,
    attach: Attach,
    write: Callable[[str], str],
    other_process: Callable[..., subprocess.Popen[str]],
) -> None:
    service = make_service()
    service.close()
    text = f"pools: [{{model: big, cpu_cache_gb: {32 * SLOT}}}]\n"
    text += f"total: {{cpu_cache_gb: {80 * SLOT}}}\ndefault: {{cpu_cache_gb: {24 * SLOT}}}\n"
    service.pools = read_pools(write(text), service.config)
    service.start()
    engine = other_process(ENGINE, service.root)
    assert engine.stdout is not None
    engine.stdout.readline()
    big, third = attach(service, about=OTHER, model="big"), attach(service, about=THIRD, model="y")
    slots = [pool.num_slots for pool in service.server.pools]
    assert slots == [24, 32, 24]
    with pytest.raises(ArenaError, match=r"other pools have all .*entry for the model 'z'"):
        attach(service, about=FOURTH, model="z")
    engine.kill()
    engine.wait()
    until(lambda: len(service.server.engines) == 2)
    assert attach(service, about=FOURTH, model="z").cache.info.num_slots == 24
    assert [each.model for each in service.server.pools] == ["big", "y", "z"]
    assert big.store(keys_of("a", 3))
    assert third.store(keys_of("a", 3))


def test_a_pool_with_an_entry_does_not_end_for_others(
    make_service: MakeService,
    attach: Attach,
    write: Callable[[str], str],
    other_process: Callable[..., subprocess.Popen[str]],
) -> None:
    """What it has is kept for its model anyway."""
    service = make_service()
    service.close()
    text = (
        f"pools: [{{model: toy, cpu_cache_gb: {32 * SLOT}}}]\ntotal: {{cpu_cache_gb: {48 * SLOT}}}"
    )
    service.pools = read_pools(write(text), replace(service.config, cpu_cache_gb=16 * SLOT))
    service.start()
    engine = other_process(ENGINE, service.root)
    assert engine.stdout is not None
    engine.stdout.readline()
    attach(service, about=OTHER, model="x")
    engine.kill()
    engine.wait()
    until(lambda: len(service.server.engines) == 1)
    with pytest.raises(ArenaError, match="other pools have all"):
        attach(service, about=THIRD, model="y")
    assert [each.model for each in service.server.pools] == ["toy", "x"]


def test_a_pool_keeps_its_size_over_a_restart_with_another_file(
    make_service: MakeService,
    attach: Attach,
    write: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    monkeypatch.setattr(attaching, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(attached, "_LAST_WRITES_SECONDS", 0.01)
    service = make_service(16)
    one = attach(service)
    one.store(keys_of("a", 3))
    service.close()
    text = f"pools: [{{model: toy, cpu_cache_gb: {24 * SLOT}}}]\n"
    service.pools = read_pools(write(text), service.config)
    with caplog.at_level(logging.WARNING):
        service.start()
        until(lambda: attached_again(service, one))
    lines = [each.message for each in caplog.records if "hand back" in each.message]
    assert len(lines) == 1
    assert "pool of 'toy' keeps the 0.00 GiB" in lines[0]
    assert service.pool.num_slots == 16
    assert one.load(keys_of("a", 3))
    until(service.accounted)
    assert attach(service, about=ABOUT).cache.info.num_slots == 16
