# SPDX-License-Identifier: Apache-2.0
"""Requests that wait because another one loads their first missing page.

SGLang keeps loaded pages to their request until its forward pass has ended. Requests of one batch
with the same prefix would each load a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence


class SharedPrefixes:
    """The waiting requests of one engine, by the first page that SGLang's own cache lacks.
    Single-threaded.

    Of the requests with the same first page, one is scheduled while the others wait. If it loads
    the page, they wait until SGLang's own cache has the page. If it computes the page, they wait no
    longer.

    Args:
        is_loadable: returns whether host memory has the page of this hash.
    """

    def __init__(self, is_loadable: Callable[[str], bool]) -> None:
        self._is_loadable = is_loadable
        self._first: dict[str, tuple[str, Hashable]] = {}
        self._loading: dict[str, tuple[str, int]] = {}
        self._computed: set[str] = set()
        self._unsure: set[str] = set()

    def waits(self, rid: str, page: str, kind: Hashable) -> None:
        """Note a waiting request.

        Args:
            rid: id of the request.
            page: hash of the first page that SGLang's own cache lacks.
            kind: SGLang may schedule requests of one kind before those of another.
        """
        self._first[rid] = page, kind

    def is_unsure(self, rid: str) -> bool:
        """Whether the first missing page of a request was known and is no longer, because loads
        have ended since; once for each such change."""
        unsure = rid in self._unsure
        self._unsure.discard(rid)
        return unsure

    def loads(self, rid: str, page: str, batch: int) -> None:
        """A request loads pages from this one on, in the batch of this number."""
        self._loading[page] = rid, batch

    def cancelled(self, rid: str) -> None:
        """A request does not load its pages. Idempotent."""
        self._loading = {page: load for page, load in self._loading.items() if load[0] != rid}

    def scheduled(self, rids: Sequence[str]) -> None:
        """SGLang computes these requests next. Loads are known already."""
        for rid in rids:
            page, _ = self._first.pop(rid, ("", None))
            if page and page not in self._loading:
                self._computed.add(page)

    def end_loads(self, batch: int) -> None:
        """The loads of all batches up to this one have ended: SGLang's own cache has their pages,
        or never gets them."""
        ended = {page for page, (_, number) in self._loading.items() if number <= batch}
        for page in ended:
            del self._loading[page]
        self._unsure |= {rid for rid, (page, _) in self._first.items() if page in ended}
        for rid in self._unsure:
            self._first.pop(rid, None)

    def held(self, rids: Sequence[str], others: Sequence[bool]) -> list[bool]:
        """Which requests SGLang must not schedule yet.

        Args:
            rids: all waiting requests, in the order of SGLang's queue; the rest is forgotten.
            others: which of them wait for another reason.
        """
        first: dict[str, tuple[str, Hashable]] = {}
        leaders: dict[tuple[str, Hashable], bool | None] = {}
        held = list(others)
        for place, rid in enumerate(rids):
            group = self._first.get(rid)
            if group is not None:
                first[rid] = group
                if not held[place]:
                    held[place] = self._waits(group, leaders)
        self._first = first
        self._unsure.intersection_update(rids)
        self._computed.intersection_update(page for page, _ in first.values())
        return held

    def clear(self) -> None:
        """Forget all requests and loads."""
        self._first.clear()
        self._unsure.clear()
        self._loading.clear()
        self._computed.clear()

    def _waits(
        self, group: tuple[str, Hashable], leaders: dict[tuple[str, Hashable], bool | None]
    ) -> bool:
        """Whether the next request of a group waits. `leaders`: the groups of earlier requests that
        do not, and whether the others of the group wait for them, once that is known."""
        page, _ = group
        if page in self._loading:
            return True
        if group not in leaders:
            leaders[group] = None
            return False
        waits = leaders[group]
        if waits is None:
            waits = leaders[group] = page not in self._computed and self._is_loadable(page)
        return waits
