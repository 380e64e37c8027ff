# SPDX-License-Identifier: Apache-2.0
"""Requests as SGLang's scheduler has them, by what FlexKV reads of them."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any


class Request:
    def __init__(self, rid: str, prompt: list[int], prefix: int = 0, **others: Any) -> None:
        self.rid = rid
        self.origin_input_ids = prompt
        self.output_ids = array("q")
        self.prefix_len = prefix
        self.extend_end = len(prompt)
        self.extra_key = others.get("tenant")
        self.cache_salt = others.get("salt")
        self.session_id = others.get("session_id")
        self.session = None
        self.is_retracted = False
        self.sampling_params = SimpleNamespace(custom_params=others.get("params"))

    def finished(self) -> bool:
        return len(self.output_ids) > 0
