# SPDX-License-Identifier: Apache-2.0
"""Asks the only engine of a runtime directory as operators do."""

from __future__ import annotations

import json
from typing import Any

from flexkv.operators.ask_door import ask
from flexkv.session.state_reports import Subject, read_states


def call_door(root: str, path: str, **question: Any) -> Any:
    """The answer of the engine's door."""
    (report,) = read_states(root, Subject.HEALTH)
    body = json.dumps(question).encode()
    answer = ask(root, str(report["door"]), "engine", ("POST", path), body, seconds=120.0)
    return json.loads(answer)
