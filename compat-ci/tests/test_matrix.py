# SPDX-License-Identifier: Apache-2.0
"""versions.toml holds together, and says the same as what it is about."""

from __future__ import annotations

import pytest
from packaging.version import Version

from compat_ci import matrix
from compat_ci.matrix import ROOT, Level


def test_versions_are_in_order_and_files_are_there() -> None:
    for engine in matrix.load().values():
        versions = [Version(release.version) for release in engine.releases]
        assert versions == sorted(set(versions))
        assert engine.adapter.is_dir()
        assert all(folder.is_dir() for folder in engine.uses)
        tests = [ROOT / test for tests in engine.tests.values() for test in tests]
        assert tests
        assert all(test.is_file() for test in tests)


def test_every_level_above_static_has_tests() -> None:
    for engine in matrix.load().values():
        levels = {level for release in engine.releases for level in release.level.upto()}
        assert levels - {Level.STATIC} <= set(engine.tests)


def test_the_adapter_starts_with_the_versions_that_it_is_tested_with() -> None:
    versions = pytest.importorskip("flexkv_vllm.compat.versions", reason="needs flexkv-vllm")
    vllm = matrix.load()["vllm"]
    served = [Version(release.version).release[:2] for release in vllm.served]
    assert [served[0], served[-1]] == [versions.CONNECTOR.oldest, versions.CONNECTOR.newest]
    # All between them, too: the range has no holes.
    minors = [minor for _, minor in served]
    assert minors == list(range(minors[0], minors[-1] + 1))
    since = Version(vllm.since["flexkv_vllm.offloading"]).release
    assert [since, served[-1]] == [versions.OFFLOADING.oldest, versions.OFFLOADING.newest]


def test_sglangs_adapter_starts_with_the_versions_that_it_is_tested_with() -> None:
    compat = pytest.importorskip("flexkv_sglang.compat", reason="needs flexkv-sglang")
    sglang = matrix.load()["sglang"]
    since = Version(sglang.since["flexkv_sglang.linker"]).release
    served = [Version(release.version).release for release in sglang.served]
    assert [since, served[-1]] == [compat.LINKER.oldest, compat.LINKER.newest]
    assert [served[0], None] == [compat.STORAGE.oldest, compat.STORAGE.newest]


def test_what_is_unknown_is_refused_with_what_is_known() -> None:
    with pytest.raises(ValueError, match=r"level 'all'; allowed: static, scheduler, engine"):
        Level.parse("all")
    with pytest.raises(
        ValueError, match=r"vllm 0\.1\.0 is not in versions\.toml; allowed: .*0\.31"
    ):
        matrix.load()["vllm"].release("0.1.0")
