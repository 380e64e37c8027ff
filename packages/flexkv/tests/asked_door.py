# SPDX-License-Identifier: Apache-2.0
"""Asks the only engine of a runtime directory as operators do."""

from __future__ import annotations

import json
import time
from typing import Any

from flexkv.control.ask_door import ask
from flexkv.session.state_reports import Subject, read_states

_PATIENCE_SECONDS = 60.0


def call_door(root: str, path: str, **question: Any) -> Any:
    """The answer of the engine's door, which its report may name a second after its start."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    (report,) = read_states(root, Subject.HEALTH)
    while not report["door"] and time.monotonic() < deadline:
        time.sleep(0.05)
        (report,) = read_states(root, Subject.HEALTH)
    body = json.dumps(question).encode()
    answer = ask(root, str(report["door"]), "engine", ("POST", path), body, seconds=120.0)
    return json.loads(answer)
