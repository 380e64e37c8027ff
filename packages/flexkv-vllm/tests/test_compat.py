# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys

import pytest
import vllm

from flexkv import EngineVersionError
from flexkv_vllm.compat import check_version


@pytest.mark.parametrize("version", ["0.27.1", "0.32.0", "0.32.9", "0.30.0+cpu", "0.31.0rc1"])
def test_supported_versions(version: str) -> None:
    check_version(False, version)


@pytest.mark.parametrize("version", ["0.26.9", "0.33.0", "1.0.0", "0.9.2", "dev"])
def test_other_versions_are_refused_unless_allowed(version: str) -> None:
    with pytest.raises(EngineVersionError, match=r"vLLM .* is installed; allowed: 0\.27 to 0\.32"):
        check_version(False, version)
    check_version(True, version)


def test_the_installed_version_is_supported() -> None:
    check_version(False, vllm.__version__)


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
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert "class flexkv_vllm.connector\n" in result.stdout


def test_nothing_we_override_is_unknown_to_vllm() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from flexkv_vllm.connector import FlexKVConnectorV1

    assert not FlexKVConnectorV1.__abstractmethods__
    ours = {name for name in vars(FlexKVConnectorV1) if not name.startswith("_")}
    assert ours <= set(dir(KVConnectorBase_V1))


def test_the_shim_has_all_that_vllms_connector_forwards() -> None:
    import inspect
    import re

    from vllm.distributed.kv_transfer.kv_connector.v1 import flexkv_connector

    from flexkv.integration.vllm.vllm_v1_adapter import FlexKVConnectorV1Impl

    source = inspect.getsource(flexkv_connector)
    called = set(re.findall(r"self\._flexkv_connector\.(\w+)\(", source))
    assert len(called) >= 15
    assert called <= set(dir(FlexKVConnectorV1Impl))
