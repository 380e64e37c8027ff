# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace

import pytest

from flexkv import LayoutError
from flexkv_sglang.support import check_cache

FULL, SWA = SimpleNamespace(name="FULL"), SimpleNamespace(name="SWA")


def test_full_attention_is_cached() -> None:
    check_cache([FULL], SimpleNamespace(mtp_draft_device_pools=()))


def test_what_is_beside_full_attention_is_refused() -> None:
    with pytest.raises(LayoutError, match="keeps SWA beside full attention; allowed: full"):
        check_cache([FULL, SWA], SimpleNamespace())


def test_a_draft_with_kv_of_its_own_is_refused() -> None:
    params = SimpleNamespace(sidecar_draft_device_pools=(object(),))
    with pytest.raises(LayoutError, match=r"\(sidecar_draft_device_pools\)"):
        check_cache([FULL], params)
