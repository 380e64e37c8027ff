# SPDX-License-Identifier: Apache-2.0
"""An engine without a model fails a test if its requests never end, and says why."""

from __future__ import annotations

import random

import pytest
from engine_world import MakeWorld, random_prompt
from texts import Text

from flexkv_vllm.connector import FlexKVConnectorV1


def test_a_load_that_no_worker_reports_is_named(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    prompt = random_prompt(random.Random(1), 100)
    world.generate(prompt)
    world.forget()
    loaded = world.add(prompt)
    with monkeypatch.context() as patch:
        patch.setattr(FlexKVConnectorV1, "get_finished", lambda *_: (None, None))
        with pytest.raises(AssertionError, match=f"stands still: {loaded} .* waits for its load$"):
            world.run()
    world.run()
    world.check_outputs()


def test_a_token_that_no_step_gives_is_named(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(lag=random.Random(2))
    lost = world.add(random_prompt(random.Random(2), 10), max_tokens=1)
    with monkeypatch.context() as patch:
        patch.setattr(Text, "sample", lambda *_: [])
        with pytest.raises(AssertionError, match=f"{lost} .* waits for 1 tokens of earlier steps$"):
            world.run()
    world.abort(lost)
    other = world.generate(random_prompt(random.Random(3), 10))
    assert len(world.outputs[other]) == 4
