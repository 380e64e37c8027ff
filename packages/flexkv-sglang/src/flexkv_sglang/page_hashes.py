# SPDX-License-Identifier: Apache-2.0
"""SGLang's hashes of the pages of its requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, cast


class PageHashes:
    """The hashes of one engine's pages.

    Args:
        tree: SGLang's cache; borrowed.
    """

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
            request: SGLang's request.
            pages: how many pages to leave out.
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
