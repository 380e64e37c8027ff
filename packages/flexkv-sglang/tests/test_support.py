# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace

import pytest

from flexkv import ConfigError, LayoutError
from flexkv_sglang.support import check_cache

FULL, SWA, MAMBA = (SimpleNamespace(name=name) for name in ("FULL", "SWA", "MAMBA"))


def test_full_attention_is_cached() -> None:
    check_cache([FULL], SimpleNamespace(mtp_draft_device_pools=()))


def test_windows_in_pages_of_their_own_are_cached() -> None:
    check_cache([FULL, SWA], SimpleNamespace(sidecar_draft_device_pools=()))


def test_windows_beside_a_draft_are_refused_with_the_way_out() -> None:
    params = SimpleNamespace(sidecar_draft_device_pools=(object(),))
    allowed = "one of both, NGRAM, or, with windows, --disable-hybrid-swa-memory of SGLang$"
    message = f"--speculative-algorithm .* windows or .* {allowed}"
    for kind in (SWA, MAMBA):
        with pytest.raises(ConfigError, match=message):
            check_cache([FULL, kind], params)


def test_recurrent_states_are_cached() -> None:
    off = SimpleNamespace(enabled=False)
    pool = SimpleNamespace(mamba_ckpt_pool=None, short_conv_pool=off, ngram_pool=off)
    check_cache([FULL, SWA, MAMBA], SimpleNamespace(req_to_token_pool=pool))


def test_unknown_states_are_refused() -> None:
    unknown = SimpleNamespace(name="NEW")
    with pytest.raises(LayoutError, match=r"keeps NEW beside .*windows, recurrent states$"):
        check_cache([FULL, unknown], SimpleNamespace())


@pytest.mark.parametrize("name", ["mamba_ckpt_pool", "short_conv_pool", "ngram_pool"])
def test_states_beside_states_are_refused(name: str) -> None:
    pool = SimpleNamespace(**{name: SimpleNamespace(enabled=True)})
    with pytest.raises(LayoutError, match="other states beside its recurrent states; allowed"):
        check_cache([FULL, MAMBA], SimpleNamespace(req_to_token_pool=pool))


def test_a_draft_with_pages_is_cached() -> None:
    check_cache([FULL], SimpleNamespace(sidecar_draft_device_pools=(object(),)))


def test_a_draft_with_states_is_refused() -> None:
    params = SimpleNamespace(mtp_draft_mamba_pools=(object(),))
    with pytest.raises(LayoutError, match=r"\(--speculative-algorithm\) keeps Mamba states"):
        check_cache([FULL], params)


def test_a_prefix_cache_that_sglang_turned_off_is_refused() -> None:
    with pytest.raises(LayoutError, match="off for multimodal models that Transformers runs"):
        check_cache([FULL], SimpleNamespace(disable=True))
