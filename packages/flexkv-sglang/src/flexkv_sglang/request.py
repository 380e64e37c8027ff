# SPDX-License-Identifier: Apache-2.0
"""SGLang's request by the names that FlexKV has for its parts, its spans, and its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from flexkv.engine.choice.cost import Span
from flexkv.engine.scheduler.request import Match, TrackedRequest
from flexkv.engine.scheduler.spans import ContextOf, TracedWork, make_spans
from flexkv.types.packed_keys import PackedKeys

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from flexkv.engine.scheduler.engine import EngineRequest


NO_MATCH = Match(0)
"""In place of the lookup of a request that was not looked up."""


class SglangRequest:
    """See `flexkv.engine.scheduler.engine.EngineRequest`. `sglang` is SGLang's own object;
    borrowed."""

    block_hashes: Sequence[bytes] = ()  # `PageHashes` makes them

    def __init__(self, request: Any) -> None:
        self.sglang = request

    @property
    def request_id(self) -> str:
        return cast("str", self.sglang.rid)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.sglang.output_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.sglang.origin_input_ids)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV SGLang has when it begins the next step of the request."""
        return cast("int", self.sglang.prefix_len)

    @property
    def kv_transfer_params(self) -> Any:
        return getattr(self.sglang.sampling_params, "custom_params", None)

    @property
    def cache_salt(self) -> str | None:
        return cast("str | None", self.sglang.cache_salt)

    @property
    def session_id(self) -> object:
        """The name of the conversation; None if there is none."""
        return self.sglang.session_id

    @property
    def kv_hints(self) -> object:
        """Hints in vLLM's form, which SGLang takes too; None if there are none."""
        return getattr(self.sglang, "kv_hints", None)


@dataclass(slots=True, eq=False)
class Tracked(TrackedRequest):
    """The state of one request on the rank that decides, from SGLang's queue to its end.

    Attributes:
        own_tokens: tokens that SGLang had for it at its latest match.
        missing: keys of the pages that SGLang lacks, from its latest lookup; None if it counts no
            more. `last_hash` is the hash of the last one.
        loads: how many of them are loaded.
        prefix: keys of its first pages, as far as they are known; None if they are not.
        prefix_end: the hash of the last of these pages; None if there are none.
    """

    own_tokens: int = 0
    missing: PackedKeys | None = field(default=None, repr=False)
    last_hash: str = ""
    loads: int = 0
    prefix: PackedKeys | None = field(default=None, repr=False)
    prefix_end: str | None = None

    @property
    def sglang(self) -> Any:
        """SGLang's own object; borrowed."""
        return cast("SglangRequest", self.request).sglang

    @property
    def keeps(self) -> bool:
        """Whether its blocks are pinned or retained."""
        return self.options.pin or self.options.retain_seconds is not None

    @property
    def has_ended(self) -> bool:
        """Whether a request that is not in SGLang's queue has ended. SGLang drops an aborted
        request from its queue without a mark."""
        request = self.sglang
        return request.is_retracted or not self.ran or bool(request.finished())

    def looked_up(self, keys: PackedKeys, last: str) -> Match:
        """SGLang looks up the pages `keys`, which it lacks; `last` is the hash of the last one."""
        self.match, self.missing, self.last_hash = Match(self.own_tokens), keys, last
        self.load_nothing()
        return self.match

    def span(self, tokens: int) -> Span:
        """So many tokens behind those that SGLang has."""
        return Span(self.own_tokens, self.own_tokens + tokens)

    def load_nothing(self) -> None:
        """It loads no page. Idempotent."""
        self.loads, self.fetched = 0, {}

    def forget_lookup(self) -> None:
        """Its latest lookup counts no more."""
        self.match, self.missing, self.last_hash = None, None, ""
        self.load_nothing()


def traced_work() -> TracedWork:
    """The loads that have spans: none, unless SGLang makes spans in this process
    (`--enable-trace`)."""
    try:
        from sglang.srt.observability.trace import get_global_tracing_enabled
    except ImportError:  # a release that traces otherwise
        return TracedWork()
    return TracedWork(make_spans(in_sglangs_spans) if get_global_tracing_enabled() else None)


def in_sglangs_spans() -> ContextOf:
    """See `ContextOf`: SGLang's own span of the request. None for a request that it does not
    trace."""

    def context_of(request: EngineRequest) -> Context | None:
        trace = request.sglang.time_stats.trace_ctx  # type: ignore[attr-defined]
        return trace.root_span_context if trace.tracing_enable else None

    return context_of
