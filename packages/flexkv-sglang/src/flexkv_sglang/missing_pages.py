# SPDX-License-Identifier: Apache-2.0
"""The pages of a waiting request that SGLang's own cache lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from flexkv.types.tenants import tenant_number


class MissingPages:
    """See `look_ahead.Prompt`.

    Args:
        key: SGLang's key of the whole prompt; borrowed.
        first: tokens of the prompt that SGLang's cache has, whole pages.
        before: the hash of the last of these pages; None if there are none.
        page_size: tokens of a page.
        tenant: number of the request's tenant.
        most: the most tokens that the request may load; None for no limit.

    Attributes:
        tenant: as given.
    """

    def __init__(
        self,
        key: Any,
        first: int,
        before: str | None,
        page_size: int,
        *,
        tenant: int,
        most: int | None = None,
    ) -> None:
        self.tenant = tenant
        self._most = most
        self._key = key
        self._first = first
        self._before = before
        self._page_size = page_size

    @property
    def pages(self) -> int:
        """How many pages the request may load."""
        tokens = max(0, len(self._key) - self._first)
        return (tokens if self._most is None else min(tokens, self._most)) // self._page_size

    def hashes(self, start: int, stop: int, before: str | None) -> Sequence[str]:
        """See `look_ahead.Prompt`."""
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        size, first = self._page_size, self._first
        part = self._key[first + start * size : first + stop * size]
        return cast("list[str]", get_storage_hash_str(part, before or self._before, page_size=size))


def missing_pages(
    tree: Any, request: Any, *, has_states: bool = False, most: int | None = None
) -> MissingPages:
    """Match a request with SGLang's cache as SGLang does at its turn, without a hash or a lookup.

    Args:
        tree: SGLang's cache. It does not change, and does not count the match as a use.
        request: SGLang's request.
        has_states: whether the model has recurrent states. SGLang computes on from the last one.
        most: the most tokens that the request may load; None for no limit.
    """
    from sglang.srt.mem_cache.radix_cache import RadixKey

    request.refresh_fill_ids()
    tenant = tenant_number(request.cache_salt or "")
    tokens = request.full_untruncated_fill_ids
    # With embeddings of its own, a request shares no pages.
    shares = request.positional_embed_overrides is None
    limit = request._compute_max_prefix_len(len(tokens)) if shares else 0
    key = RadixKey(tokens, extra_key=request.extra_key, limit=limit, cache_salt=request.cache_salt)
    first, node, covered = tree.tree_core.match_full_device_prefix(key)
    if first and has_states:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        # Whether an earlier node has a state is not known without a match, which changes the tree.
        state = tree.tree_core.get_component_device_value(node, ComponentType.MAMBA)
        first = first if first == covered and state is not None else 0
    key, _ = key.maybe_to_bigram_view(tree.tree_core.is_eagle)
    before = None
    if first:
        # The match may end within the node, whose pages are the last of those covered.
        hashes = tree.tree_core.get_hash_values(node)
        place = len(hashes) - 1 - (covered - first) // tree.page_size
        if place >= 0:
            before = hashes[place]
        else:
            first = len(key)  # the hashes of the pages behind are unknown
    return MissingPages(key, first, before, tree.page_size, tenant=tenant, most=most)
