# SPDX-License-Identifier: Apache-2.0
"""Requests as SGLang's scheduler has them, by what FlexKV reads of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from flexkv_sglang.hashes import PageHashes


class OwnPages(PageHashes):
    """Hashes of pages as SGLang has them, for tests without it.

    Args:
        own: of the pages that SGLang's cache has, for any request.
        behind: of the other pages of a request, at its end.
    """

    def __init__(self, own: Sequence[str] = (), behind: Sequence[str] = ()) -> None:
        self.own = own
        self.pages = behind
        self.asked: list[tuple[int, str | None]] = []

    def of_hit(self, request: Any) -> Sequence[str]:
        return self.own

    def behind(self, request: Any, pages: int, before: str | None) -> Sequence[str]:
        self.asked.append((pages, before))
        return self.pages


class Grammars:
    """SGLang's requests whose grammars are being compiled.

    Args:
        ready: requests whose grammars are compiled.
        compiling: the other ones.

    Attributes:
        grammar_queue: all of them.
    """

    def __init__(self, ready: Sequence[Any] = (), compiling: Sequence[Any] = ()) -> None:
        self.grammar_queue = [*ready, *compiling]
        self._compiling = list(compiling)

    def has_waiting_grammars(self) -> bool:
        return bool(self.grammar_queue)

    def get_ready_grammar_requests(self) -> list[Any]:
        ready = [each for each in self.grammar_queue if each not in self._compiling]
        self.grammar_queue = self._compiling
        return ready


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
