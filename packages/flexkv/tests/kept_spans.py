# SPDX-License-Identifier: Apache-2.0
"""What FlexKV would make spans of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexkv.engine.scheduler.engine import EngineRequest
from flexkv.engine.scheduler.spans import OtelSpans


class KeptSpans(OtelSpans):
    """Keeps all that it is told, by the ids of the requests."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, dict[str, Any]]] = []

    def add(
        self, request: EngineRequest, name: str, begun: float, attributes: Mapping[str, Any]
    ) -> None:
        self.spans.append((request.request_id, name, dict(attributes)))
