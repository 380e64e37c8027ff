# SPDX-License-Identifier: Apache-2.0
"""The pages of a request that SGLang's own cache has and lacks, by SGLang's hashes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, cast


class PageHashes:
    """The hashes of one engine's pages."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def of_hit(self, request: Any) -> Sequence[str]:
        """The hashes of the pages of a request's prompt that SGLang's cache has. A streaming
        session keeps its pages outside that cache."""
        if request.session is not None:
            return ()
        node, tree = request.last_node, self._tree
        return [*tree.get_prefix_hash_values(node), *tree.tree_core.get_hash_values(node)]

    def behind(self, request: Any, pages: int, before: str | None) -> Sequence[str]:
        """The hashes of the whole pages of a request's prompt and answer behind the first `pages`
        pages. SGLang does not compute the last token of an answer.

        Args:
            before: the hash of the last of them; None if there are none.
        """
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        size = self._tree.page_size
        prompt, answer = request.origin_input_ids, request.output_ids
        tokens = array("q", prompt[pages * size :])
        tokens.extend(answer[max(0, pages * size - len(prompt)) : max(0, len(answer) - 1)])
        key = RadixKey(tokens, extra_key=request.extra_key, cache_salt=request.cache_salt)
        key, _ = key.maybe_to_bigram_view(self._tree.tree_core.is_eagle)
        whole = len(key) // size * size
        if whole == 0:
            return ()
        return cast("list[str]", get_storage_hash_str(key[:whole], before, page_size=size))


class MissingPages:
    """The pages of a prompt that SGLang's own cache lacks, and the request may load.

    Args:
        key: SGLang's key of the whole prompt; borrowed.
        first: tokens of the prompt that SGLang's cache has, whole pages.
        before: the hash of the last of these pages; None if there are none.
        most: the most tokens that the request may load; None for no limit.
    """

    def __init__(
        self,
        key: Any,
        first: int,
        before: str | None,
        page_size: int,
        *,
        most: int | None = None,
    ) -> None:
        self._most = most
        self._key = key
        self._first = first
        self._before = before
        self._page_size = page_size

    @property
    def pages(self) -> int:
        """How many there are."""
        tokens = max(0, len(self._key) - self._first)
        return (tokens if self._most is None else min(tokens, self._most)) // self._page_size

    def hashes(self, start: int, stop: int, before: str | None) -> Sequence[str]:
        """SGLang's hashes of pages `start` to `stop`. `before` is the hash of the page before them;
        None if `start` is 0."""
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
        has_states: whether the model has recurrent states. SGLang computes on from the last one.
        most: the most tokens that the request may load; None for no limit.
    """
    from sglang.srt.mem_cache.radix_cache import RadixKey

    request.refresh_fill_ids()
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
    return MissingPages(key, first, before, tree.page_size, most=most)
