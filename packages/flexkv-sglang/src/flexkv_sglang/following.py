# SPDX-License-Identifier: Apache-2.0
"""Follows SGLang's requests from lookup to end, for the eviction policy and the recorder.

A linker sees hashes of the pages that SGLang lacks, and neither requests nor answers. The batches
of SGLang's scheduler have the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from flexkv.client import CacheClient
from flexkv.engine.scheduler.hints import EngineHints
from flexkv.engine.scheduler.request_options import OptionsReader, tenant_session
from flexkv.eviction import RequestContext
from flexkv.figures.meter import Meter
from flexkv.types.packed_keys import PackedKeys
from flexkv.types.tenants import tenant_number
from flexkv_sglang.recording import RequestRecorder
from flexkv_sglang.trailing import NONE_TRAILING, TrailingPages

_LOOK_SECONDS = 1.0
"""Seconds between two checks for ended requests. A check costs one call per running request. Not
tuned."""

_UNSCHEDULED = 64
"""Lookups of requests that left unscheduled, before these are searched for. Not tuned."""

_PARAMETERS = ("session", "returns", "release")
"""Parameters of requests that FlexKV follows in SGLang's `custom_params`."""


class FollowedRequests:
    """The requests of one engine, on the rank that decides. Single-threaded.

    Args:
        cache: learns of the requests; borrowed.
        page_size: tokens of a block.
        keys_of: returns the keys of blocks for SGLang's hashes of pages.
        recorder: records the requests; None if nothing is recorded. Owned.
        options: parameters that requests may set (setting `request_options`); None for all.
        trailing: the pages of which a hit needs the last.
    """

    def __init__(
        self,
        cache: CacheClient,
        page_size: int,
        keys_of: Callable[[Sequence[str]], PackedKeys],
        recorder: RequestRecorder | None,
        options: Collection[str] | None = None,
        *,
        trailing: TrailingPages = NONE_TRAILING,
    ) -> None:
        self._trailing = trailing
        self._cache = cache
        self._page_size = page_size
        self._keys_of = keys_of
        self._recorder = recorder
        self._options = OptionsReader(options, _PARAMETERS, "custom_params")
        self._looked_up: dict[str, PackedKeys] = {}
        self._loaded: dict[str, int] = {}
        self._running: dict[str, Any] = {}
        self._checked = time.monotonic()

    def put_counts(self, meter: Meter) -> None:
        """See `OptionsReader.put_counts`."""
        self._options.put_counts(meter)

    def looked_up(self, rid: str, keys: PackedKeys) -> None:
        """Note the latest lookup of a request: the keys of the pages that SGLang lacks."""
        self._looked_up[rid] = keys

    def forget_lookups(self) -> None:
        """Forget all lookups: from now on, keys have another end."""
        self._looked_up.clear()

    def loads(self, rid: str, pages: int) -> None:
        """Note that a request loads its first `pages` pages of the latest lookup."""
        self._loaded[rid] = pages

    def cancelled(self, rid: str) -> None:
        """Note that a request loads nothing. Idempotent."""
        self._loaded.pop(rid, None)

    def batch(
        self,
        requests: Sequence[Any],
        waiting: Sequence[Any],
        own_hashes: Callable[[Any], Sequence[str]],
    ) -> None:
        """Report a batch that SGLang computes next, and the requests that have ended.

        Args:
            requests: SGLang's requests of the batch; borrowed until they end.
            waiting: the requests in SGLang's queue. Lookups of any others are discarded in time.
            own_hashes: returns the hashes of the pages of a request that SGLang's own cache has.
        """
        for request in requests:
            rid = request.rid
            found, loaded = self._looked_up.pop(rid, None), self._loaded.pop(rid, 0)
            # SGLang computes a long prompt in chunks, and resumes requests that it had retracted.
            if loaded or rid not in self._running:
                self._began(request, found, loaded, own_hashes)
        if len(self._looked_up) > 2 * len(waiting) + _UNSCHEDULED:
            known = {each.rid for each in waiting}
            self._looked_up = {rid: keys for rid, keys in self._looked_up.items() if rid in known}
        now = time.monotonic()
        if now - self._checked >= _LOOK_SECONDS:
            self._checked = now
            self._end([each for each in self._running.values() if _has_ended(each, waiting)])

    def close(self) -> None:
        """Report the end of all requests and close the recorder."""
        self._end(list(self._running.values()))
        if self._recorder is not None:
            self._recorder.close()

    def _began(
        self,
        request: Any,
        found: PackedKeys | None,
        loaded: int,
        own_hashes: Callable[[Any], Sequence[str]],
    ) -> None:
        rid, size = request.rid, self._page_size
        prompt_tokens = len(request.origin_input_ids)
        own_tokens = max(0, request.prefix_len - loaded * size)
        context = self._context_of(request)
        if rid not in self._running:
            self._running[rid] = request
            if self._recorder is not None:
                hit = loaded * size
                self._recorder.began(rid, prompt_tokens, own_tokens, hit, context.session)
        none = self._keys_of(())
        found = none if found is None else found
        own = self._keys_of(own_hashes(request)) if own_tokens else none
        if len(own) != own_tokens // size:
            own = none  # those of a streaming session are unknown
        prompt = own + found
        if len(prompt) > max(0, prompt_tokens - 1) // size:
            prompt = own + found[:loaded]  # the lookup is older than SGLang's own hit
        hits = len(own) + loaded
        used: Sequence[bytes] = prompt[:hits]
        if self._trailing:
            used = [*used, *self._trailing.keys_of_hit(used)]
        self._cache.record(used, replace(context, hit_tokens=hits * size), prompt)

    def _context_of(self, request: Any) -> RequestContext:
        """What is known of a request, without its hit."""
        rid = request.rid
        params = getattr(request.sampling_params, "custom_params", None)
        hints = EngineHints(request.session_id, envelope=getattr(request, "kv_hints", None))
        options = self._options.read(rid, params, hints)
        tenant = f"{request.extra_key or ''}\0{request.cache_salt or ''}"
        return RequestContext(
            len(request.origin_input_ids),
            request_id=rid,
            session=tenant_session(tenant, options.session),
            returns=options.returns,
            tenant=tenant_number(request.cache_salt or ""),
        )

    def _end(self, requests: Sequence[Any]) -> None:
        for request in requests:
            del self._running[request.rid]
            self._cache.ended(request.rid, len(request.output_ids))
            if self._recorder is not None:
                self._recorder.ended(request)


def _has_ended(request: Any, waiting: Sequence[Any]) -> bool:
    """Whether a request that was computed has ended. SGLang drops an aborted request from its queue
    without a mark."""
    if request.is_retracted and all(each is not request for each in waiting):
        return True
    ended: bool = request.finished()
    return ended
