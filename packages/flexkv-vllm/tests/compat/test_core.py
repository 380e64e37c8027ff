# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

import pytest
import vllm
from patience import PATIENCE_SECONDS
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from flexkv import EngineVersionError
from flexkv_vllm.compat.core import check_version, fences_get_through, warn_if_newer
from flexkv_vllm.connector import FlexKVConnectorV1


def check(allow_untested: bool, version: str) -> None:
    check_version(allow_untested, FlexKVConnectorV1, version)


@pytest.mark.parametrize("version", ["0.20.2", "0.33.0", "0.32.9", "0.30.0+cpu", "0.31.0rc1"])
def test_supported_versions(version: str) -> None:
    check(False, version)


@pytest.mark.parametrize("version", ["0.19.9", "0.9.2", "0.0.0", "dev"])
def test_older_versions_are_refused_unless_allowed(version: str) -> None:
    with pytest.raises(EngineVersionError, match=r"vLLM .* is installed; allowed: 0\.20 to 0\.33"):
        check(False, version)
    check(True, version)


@pytest.mark.parametrize("version", ["0.34.0", "0.40.1rc1", "1.0.0"])
def test_newer_versions_with_all_features_start_with_one_warning(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    check(False, version)
    assert not caplog.records
    warn_if_newer(version)
    (record,) = caplog.records
    assert version in record.getMessage()


def test_newer_versions_that_lack_a_feature_are_refused_unless_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(KVConnectorBase_V1, "reset_cache")
    lacking = r"vLLM 0\.34\.0 is installed; allowed.*; it lacks .*reset_cache"
    with pytest.raises(EngineVersionError, match=lacking):
        check(False, "0.34.0")
    check(True, "0.34.0")
    check(False, "0.33.0")


def test_tested_versions_start_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_newer(vllm.__version__)
    assert not caplog.records


def test_the_installed_version_is_supported() -> None:
    check(False, vllm.__version__)


def test_vllms_plugins_bring_our_connector_however_often_they_run() -> None:
    code = (
        "from vllm.plugins import load_general_plugins\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as F\n"
        "load_general_plugins()\n"
        "from flexkv_vllm.plugin import register\n"
        "register()\n"
        "cls = F.get_connector_class_by_name('FlexKVConnectorV1')\n"
        "print('class', cls.__module__)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=10 * PATIENCE_SECONDS,
    )
    assert "class flexkv_vllm.connector\n" in result.stdout


def test_fences_get_through_if_vllm_hands_over_the_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fences_get_through()

    def as_in_018(self: object, preempted_req_ids: set[str]) -> None: ...

    monkeypatch.setattr(KVConnectorBase_V1, "handle_preemptions", as_in_018)
    assert not fences_get_through()
    with pytest.raises(EngineVersionError, match=r"any version from 0\.19 on with allow_untested"):
        check(True, "0.18.1")
