# SPDX-License-Identifier: Apache-2.0
"""A side of FlexKV that follows what hooks of SGLang report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.choice.cost import Span
from flexkv_sglang.copies import Origin
from flexkv_sglang.delayed_offloads import DelayedOffloads
from flexkv_sglang.hashes import PageHashes
from flexkv_sglang.keys import PageKeys
from flexkv_sglang.ranks import Exchanges, Ranks
from flexkv_sglang.stages import StagedLoads
from flexkv_sglang.trailing import NONE_TRAILING


class Side:
    """A side for which these requests wait."""

    may_wait = True

    def __init__(self, *waiting: str) -> None:
        self.held_back = waiting
        self.asked: list[str] = []
        self.weights: list[bool] = []
        self.page_keys = PageKeys()
        self.spans: list[list[Span]] = []
        self.counted: list[tuple[list[str], list[str]]] = []
        self.own: list[list[str]] = []
        self.origin = Origin("unset")
        self.trailing = NONE_TRAILING
        self.leads = True
        self.boundary = ErrorBoundary()
        self.looks_ahead = False
        self.matches: list[tuple[str, int]] = []
        self.limits: dict[str, int] = {}
        self.keeping = 0
        self.went_on = 0
        self.weights_return = True
        self.delays = False
        self.delayed = DelayedOffloads(Exchanges(Ranks(), self.boundary))
        self.is_loading = False
        self.staged: StagedLoads | None = None
        self.known: list[int] = []

    @property
    def requests(self) -> Side | None:
        return self if self.leads else None

    @property
    def waiting(self) -> Side:
        return self

    def matched(self, request: Any, own_tokens: int) -> None:
        self.matches.append((request.rid, own_tokens))

    def limit(self, request: Any) -> int | None:
        return self.limits.get(request.rid)

    def is_new(self, rid: str) -> bool:
        return rid not in self.asked

    def look_ahead(self, request: Request, prompt: object) -> None:
        assert prompt == f"pages of {request.rid}"
        self.asked.append(request.rid)

    def go_on(self) -> None:
        self.went_on += 1

    def agree_on_length(self, lengths: Sequence[int]) -> int:
        return max(lengths, default=0) - 1

    def held(self, rids: Sequence[str]) -> list[bool]:
        return [rid in self.held_back for rid in rids]

    def loads_known(self, batch: int) -> None:
        self.known.append(batch)

    def fetched_tokens(self, rid: str) -> int:
        return 12 if rid in self.held_back else 0

    def weights_changed(self, *, flushed: bool) -> None:
        self.weights.append(flushed)

    def scheduled(
        self,
        requests: Sequence[Any],
        waiting: Iterable[Any],
        hashes: PageHashes,
    ) -> None:
        self.counted.append((rids(requests), rids(waiting)))
        self.own = [list(hashes.of_hit(each)) for each in requests if hasattr(each, "last_node")]

    def batch_begins(self, spans: Sequence[Span]) -> None:
        self.spans.append(list(spans))

    def await_copies(self) -> None:
        self.asked.append("await copies")

    def comes_from(self, origin: Origin) -> None:
        self.origin = origin


class Request:
    def __init__(self, rid: str, side: Side, tokens: int = 9, session: Any = None) -> None:
        self.rid = rid
        self.origin_input_ids = range(tokens)
        self.session = session


def rids(queue: Iterable[Request]) -> list[str]:
    return [request.rid for request in queue]
