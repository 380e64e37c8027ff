# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

pytest.importorskip("offloading_release")

from vllm.v1.kv_offload import base

from flexkv.types.changes import Medium
from flexkv_vllm.offloading.request import may_load_from


@pytest.mark.parametrize(
    ("medium", "locality", "allowed"),
    [
        (None, "LOCAL", {Medium.HOST, Medium.DISK}),
        (None, "REMOTE", {Medium.MOONCAKE, Medium.OBJECTS}),
        ("CPU", None, {Medium.HOST}),
        ("STORAGE", None, {Medium.DISK, Medium.MOONCAKE, Medium.OBJECTS}),
    ],
)
def test_a_request_loads_only_from_where_its_filter_allows(
    medium: str | None, locality: str | None, allowed: set[Medium]
) -> None:
    matcher = base.TierMatcher(
        None if medium is None else base.Medium(medium),
        None if locality is None else base.Locality(locality),
    )
    context = base.ReqContext("r", load_tier_filter=base.TierFilter((matcher,)))
    assert {each for each in Medium if may_load_from(context, each)} == allowed
