# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from flexkv_vllm.pages import Stages


@pytest.mark.parametrize("split", ["3,3,3", "1,5,3", "2,2,5"])
def test_all_stages_find_the_same_size_of_a_block(
    split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", split)
    stages = Stages(count=3, layers=9)
    sizes = [int(layers) * 4096 for layers in split.split(",")]
    totals = {stages.total_bytes(size, stage) for stage, size in enumerate(sizes)}
    assert totals == {9 * 4096}


def test_one_stage_has_all_layers() -> None:
    assert Stages(1, 9).total_bytes(4096, 0) == 4096
    assert Stages(1, 9).describe(["layer0", "layer1"]) == []


def test_stages_are_named_by_their_layers() -> None:
    stages = Stages(2, 4)
    assert stages.describe(["layer0", "layer1"]) != stages.describe(["layer2", "layer3"])
    assert stages.describe(["layer0"]) != Stages(1, 4).describe(["layer0"])
