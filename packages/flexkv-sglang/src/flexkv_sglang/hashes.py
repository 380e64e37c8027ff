# SPDX-License-Identifier: Apache-2.0
"""SGLang's hashes of the pages of requests: those that its own cache has, and those that it lacks.

SGLang's radix tree looks the latter up by `FlexKVLinker.lookup`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, cast


def radix_key(tokens: Any, *, is_bigram: bool, **parts: Any) -> Any:
    """SGLang's key of tokens; `parts` are the others of its `RadixKey`."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    key, _ = RadixKey(tokens, **parts).maybe_to_bigram_view(is_bigram)
    return key


class PromptPages:
    """The whole pages of a prompt from token `first` on.

    Args:
        key: SGLang's key of the whole prompt; borrowed.
        before: the hash of the page before token `first`; None if there is none.
        most: the most tokens of these pages; None for no limit.
    """

    def __init__(
        self,
        key: Any,
        page_size: int,
        first: int = 0,
        before: str | None = None,
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
        pages. SGLang does not compute the last token of an answer. `before`: the hash of the last
        of them; None if there are none."""
        size = self._tree.page_size
        prompt, answer = request.origin_input_ids, request.output_ids
        tokens = array("q", prompt[pages * size :])
        tokens.extend(answer[max(0, pages * size - len(prompt)) : max(0, len(answer) - 1)])
        key = radix_key(
            tokens,
            is_bigram=self._tree.tree_core.is_eagle,
            extra_key=request.extra_key,
            cache_salt=request.cache_salt,
        )
        rest = PromptPages(key, size, before=before)
        return rest.hashes(0, rest.pages, None) if rest.pages else ()


def missing_pages(
    tree: Any, request: Any, *, has_states: bool = False, most: int | None = None
) -> PromptPages:
    """The pages of a request that SGLang's cache lacks. Matches as SGLang does at the request's
    turn, without a hash or a lookup.

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
    return PromptPages(key, tree.page_size, first, before, most=most)
