# SPDX-License-Identifier: Apache-2.0
"""The models of tests under `OffloadingConnector`. Importing this skips a module with releases of
vLLM whose interface FlexKV does not serve: `flexkv_vllm.offloading` cannot be imported there."""

from __future__ import annotations

import pytest

base = pytest.importorskip("vllm.v1.kv_offload.base", reason="vLLM is older than 0.21")
if not hasattr(base.ReqContext, "get_offload_key_position"):
    pytest.skip("vLLM is older than 0.31", allow_module_level=True)

WINDOW = 40
HYBRID = pytest.mark.parametrize("windows", [(), (WINDOW,)], ids=["full", "hybrid"])
