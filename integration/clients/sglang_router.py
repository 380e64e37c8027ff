# SPDX-License-Identifier: Apache-2.0
"""SGLang's router in front of real engines."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from integration.clients.router_process import RouterProcess

_CALL_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Routed:
    """What an engine answered through the router.

    Attributes:
        tokens: its answer.
        from_host: prompt tokens that it loaded from host memory.
    """

    tokens: list[int]
    from_host: int


class SglangRouter(RouterProcess):
    """The router; a context manager that ends it.

    Args:
        python: that has it.
        engines: their URLs.
        policy: by which it chooses one.
        log: receives what it prints.
    """

    def __init__(self, python: Path, engines: Sequence[str], policy: str, log: Path) -> None:
        self._engines = len(engines)
        command: list[str | Path] = [
            *(python, "-m", "sglang_router.launch_router", "--policy", policy),
            *("--worker-urls", *engines),
        ]
        super().__init__(command, log)

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Routed:
        """The greedy answer to a prompt, from whichever engine the router chooses."""
        asked = {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0},
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{self._url}/generate", json.dumps(asked).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=_CALL_SECONDS) as answer:
            given = json.load(answer)
        sources = given["meta_info"].get("cached_tokens_details") or {}
        return Routed(given["output_ids"], sources.get("host", 0))

    def _serves(self) -> bool:
        """Whether it knows all engines, and takes requests."""
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self._url}/workers", timeout=_CALL_SECONDS) as answer,
        ):
            known = json.load(answer)["workers"]
            return len([each for each in known if each["is_healthy"]]) == self._engines
        return False
