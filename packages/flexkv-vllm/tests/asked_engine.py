# SPDX-License-Identifier: Apache-2.0
"""Asks the engine of a world as operators do."""

from __future__ import annotations

import json
from typing import Any

from engine_world import World

from flexkv.control.ask_door import ask
from flexkv.session.state_reports import Subject, read_states


def call_engine(world: World, path: str, **question: Any) -> Any:
    """The answer of the engine's door."""
    root = world.vllm_config.kv_transfer_config.get_from_extra_config("runtime_dir", "")
    (report,) = read_states(root, Subject.HEALTH)
    body = json.dumps(question).encode()
    answer = ask(root, str(report["door"]), "engine", ("POST", path), body, seconds=120.0)
    return json.loads(answer)
