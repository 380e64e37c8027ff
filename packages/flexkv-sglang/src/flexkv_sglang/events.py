# SPDX-License-Identifier: Apache-2.0
"""KV events (`--kv-events-config`) for the pages in FlexKV's tiers.

Tiers know pages by their hashes alone. SGLang's own events give the tokens: they report each page
that SGLang computes or FlexKV loads. The cache keeps their content beside pages on disk, for later
processes, and passes it on to the other engines of the node's service.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from flexkv.client import CacheClient
from flexkv.types.changes import Changes, Medium

_TYPES = {array(each).itemsize: each for each in "qI"}
"""By the bytes of a token its type; the last one suffices for text."""


class KeptPage(msgspec.Struct, frozen=True, array_like=True):
    """A page without its number, which its key has.

    Attributes:
        parent: the number of the page before it; None for the first page of a prompt.
        are_pairs: whether SGLang hashes pairs of tokens.
        width: bytes of a token.
        tokens: its tokens, or the tokens of its pairs, little-endian as the kernels' processors.
    """

    parent: int | None
    are_pairs: bool
    width: int
    tokens: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KeptPage)


def encode(parent: int | None, tokens: Sequence[Any]) -> bytes:
    """The text of a page."""
    are_pairs = bool(tokens) and isinstance(tokens[0], (tuple, list))
    single = list(chain.from_iterable(tokens)) if are_pairs else tokens
    try:
        packed = array("I", single)
    except OverflowError:  # SGLang's number of an image
        packed = array("q", single)
    return _encoder.encode(KeptPage(parent, are_pairs, packed.itemsize, packed.tobytes()))


def decode(text: bytes) -> tuple[int | None, Sequence[Any]] | None:
    """Parent and tokens of a page; None if `text` is not as `encode` made it, in this process or
    another."""
    try:
        kept = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if not kept.tokens or kept.width not in _TYPES:
        return None
    if len(kept.tokens) % (kept.width * (1 + kept.are_pairs)):
        return None
    tokens = array(_TYPES[kept.width], kept.tokens).tolist()
    if kept.are_pairs:
        return kept.parent, list(zip(tokens[::2], tokens[1::2], strict=True))
    return kept.parent, tokens


_HASH_BYTES = 32
_NUMBER_BYTES = 8
"""Leading bytes of a hash that SGLang's events carry, as a signed number."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page as SGLang's events describe it.

    Attributes:
        number: the first 8 bytes of its hash, as a signed number.
        parent: the number of the page before it; None for the first page of a prompt.
        tokens: its tokens, or pairs of tokens; none if only its number matters.
    """

    number: int
    parent: int | None = None
    tokens: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class TierEvent:
    """An event: a tier has a page from now on (`stored`), or has it no longer, where only the
    page's number is known."""

    medium: Medium
    page: Page
    stored: bool


class TierEvents:
    """The events of one engine. Single-threaded.

    Args:
        cache: the engine's cache; borrowed. Its changes are recorded from now on.
        epoch: the end of all keys until `forget_all`.

    Attributes:
        early: events of SGLang that were learned and not published yet.
        begun: whether SGLang has published an event of a page.
    """

    def __init__(self, cache: CacheClient, epoch: bytes = b"") -> None:
        self.early: list[Any] = []
        self.begun = False
        self._cache = cache
        self._epoch = epoch
        # By number, the place of each page in the order in which it was learned, and its text.
        self._pages: dict[int, tuple[int, bytes]] = {}
        self._learned = 0
        # By number, whether there is an event for the page; there is none as long as nobody has
        # described it.
        self._reported: dict[Medium, dict[int, bool]] = {medium: {} for medium in Medium}
        self._published: dict[Medium, set[int]] = {medium: set() for medium in Medium}
        self._is_torn = False  # changes were taken, and may not have been published
        self._described: dict[int, None] = {}  # pages of which tiers may lack an event
        self._removed: list[TierEvent] = []
        self._left: set[int] = set()
        self._unsure: set[int] = set()
        cache.watch()

    def learn(self, stored: Iterable[Page], removed: Iterable[int], cleared: bool) -> None:
        """Take in SGLang's events about pages on the device.

        Args:
            stored: new pages, each after its parent.
            removed: numbers of pages that have left the device.
            cleared: whether SGLang first published that no tier has any page.
        """
        if cleared:
            self._removed.clear()
            for published in self._published.values():
                published.clear()
            for reported in self._reported.values():
                known = [number for number, is_known in reported.items() if is_known]
                reported.update(dict.fromkeys(known, False))
                self._described |= dict.fromkeys(known)
            self._leave(self._pages)
        for page in stored:
            self._left.discard(page.number)
            if page.number not in self._pages:
                self._note(page.number, encode(page.parent, page.tokens))
        self._leave(removed)

    def offered(self, keys: Sequence[bytes]) -> None:
        """Pages are about to be stored. A cache that others share gives them SGLang's description
        of these, and gets it before it publishes them."""
        if self._cache.info.is_shared:
            self._keep(dict(self._numbered(keys[i] for i in self._cache.missing(keys))))

    def take(self) -> list[TierEvent]:
        """The events since the last call: removals first, then stored pages, each after its
        parent. If an error comes before `confirm`, the next call takes back all published events,
        and reports all present pages again."""
        if self._is_torn:
            self._begin_anew()
        self._is_torn = True
        removed, self._removed = self._removed, []
        new: dict[tuple[Medium, int], None] = {}
        for changes in self._cache.drain_changes():
            self._apply(changes, new, removed)
        described, self._described = self._described, {}
        for medium, reported in self._reported.items():
            new |= {(medium, number): None for number in described if number in reported}
        stored: list[tuple[int, TierEvent]] = []
        for medium, number in new:
            reported = self._reported[medium]
            if number in self._pages and not reported[number]:
                order, text = self._pages[number]
                reported[number] = True
                stored.append((order, TierEvent(medium, Page(number, *_read(text)), True)))
        status = self._cache.status
        if not (status.has_changes or status.awaits_changes):
            self._forget()
        stored.sort(key=lambda each: each[0])
        return removed + [each for _, each in stored]

    def confirm(self, events: Iterable[TierEvent]) -> None:
        """Subscribers get what `take` has returned."""
        for each in events:
            known = self._published[each.medium]
            (known.add if each.stored else known.discard)(each.page.number)
        self._is_torn = False

    def forget_all(self, epoch: bytes) -> None:
        """Forget all pages in tiers: no lookup finds them again. The next `take` reports their
        removal."""
        self._epoch = epoch
        for medium, reported in self._reported.items():
            self._removed += [
                TierEvent(medium, Page(n), False) for n, is_known in reported.items() if is_known
            ]
            reported.clear()
        self._unsure |= self._left

    def _begin_anew(self) -> None:
        self._removed = [
            TierEvent(medium, Page(number), False)
            for medium, published in self._published.items()
            for number in published
        ]
        for reported in self._reported.values():
            reported.clear()
        self._cache.watch()

    def _note(self, number: int, text: bytes) -> None:
        self._learned += 1
        self._pages[number] = self._learned, text
        self._described[number] = None

    def _apply(
        self, changes: Changes, new: dict[tuple[Medium, int], None], removed: list[TierEvent]
    ) -> None:
        """Follow the changes of a medium; add its new pages to `new`, and events to `removed`."""
        reported = self._reported[changes.medium]
        for number, _ in self._numbered(changes.removed):
            if reported.pop(number, False):
                removed.append(TierEvent(changes.medium, Page(number), False))
            self._unsure.add(number)
        added = dict(self._numbered(changes.added))
        on_disk = changes.medium is Medium.DISK
        texts = changes.texts
        if texts:
            self._learn_kept({n: texts[key] for n, key in added.items() if key in texts})
        if on_disk and not self._cache.info.is_shared:
            self._keep({n: key for n, key in added.items() if key not in texts})
        for number in added:
            reported[number] = False
            new[changes.medium, number] = None

    def _learn_kept(self, texts: Mapping[int, bytes]) -> None:
        """Learn what others say of pages that SGLang may not have, each after its parent."""
        for number in texts:
            chain: list[int] = []
            at: int | None = number
            while at is not None and at in texts and at not in self._pages and at not in chain:
                kept = decode(texts[at])
                if kept is None:
                    break
                chain.append(at)
                at = kept[0]
            for each in reversed(chain):
                self._note(each, texts[each])
                self._left.add(each)

    def _keep(self, keys: Mapping[int, bytes]) -> None:
        """Let the cache keep what is known of pages, by number their keys."""
        known = {key: self._pages[n][1] for n, key in keys.items() if n in self._pages}
        if known:
            self._cache.describe(known)

    def _numbered(self, keys: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
        """Number and key of the pages of `keys`, but those of other weights."""
        for key in keys:
            if key[_HASH_BYTES:] == self._epoch:
                yield int.from_bytes(key[:_NUMBER_BYTES], "big", signed=True), key

    def _leave(self, numbers: Iterable[int]) -> None:
        self._left.update(numbers)
        self._unsure.update(numbers)

    def _forget(self) -> None:
        """Discard pages that neither SGLang nor a tier has. SGLang keeps a page on the device until
        it is stored."""
        for number in self._unsure & self._left:
            if not any(number in reported for reported in self._reported.values()):
                self._left.discard(number)
                self._pages.pop(number, None)
        self._unsure.clear()


def _read(text: bytes) -> tuple[int | None, Sequence[Any]]:
    """Parent and tokens of a page that has been learned."""
    return decode(text) or (None, ())


def follow(events: list[Any], ours: TierEvents, page_size: int) -> list[Any]:
    """SGLang's events, with those that were learned early, followed by FlexKV's.

    A disk's pages are found before the server takes requests, and SGLang publishes while it is
    idle. Who subscribes when the server is ready would miss them, so that they wait until SGLang
    itself has told of a page. `ours` learns the pages' tokens from SGLang's events, which stay
    unchanged.
    """
    early, ours.early = ours.early, []
    _learn(events, ours)
    own = ours.take() if ours.begun else []
    published = [*early, *events, *_to_sglang(own, page_size)]
    ours.confirm(own)
    return published


def learn_early(events: list[Any], ours: TierEvents) -> None:
    """Learn from events of SGLang that `follow` is to publish."""
    ours.early += events
    _learn(events, ours)


def _learn(events: list[Any], ours: TierEvents) -> None:
    from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

    for event in events:
        if isinstance(event, BlockStored):
            ours.begun = True
            ours.learn(_pages_of(event), (), cleared=False)
        elif isinstance(event, BlockRemoved):
            ours.learn((), event.block_hashes, cleared=False)
        elif isinstance(event, AllBlocksCleared):
            ours.learn((), (), cleared=True)


def _pages_of(event: Any) -> Iterator[Page]:
    """The pages of an event. Pages of a tenant or an adapter are left out: SGLang's events have
    other hashes for them than its storage, and no tier can find a page by those."""
    if event.cache_salt is not None or event.lora_name is not None:
        return
    parent, size = event.parent_block_hash, event.block_size
    for i, number in enumerate(event.block_hashes):
        yield Page(number, parent, event.token_ids[i * size : (i + 1) * size])
        parent = number


def _to_sglang(events: Iterable[TierEvent], page_size: int) -> list[Any]:
    """FlexKV's events as SGLang's, adjacent pages joined as SGLang joins its own."""
    from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium
    from sglang.srt.mem_cache.events import KVCacheEventRecorder

    # Shared stores report no changes.
    media = {Medium.HOST: StorageMedium.CPU, Medium.DISK: StorageMedium.DISK}
    recorder = KVCacheEventRecorder(enabled=True, page_size=page_size)
    for each in events:
        page, medium = each.page, media[each.medium]
        if not each.stored:
            recorder.enqueue(BlockRemoved(block_hashes=[page.number], medium=medium))
            continue
        recorder.enqueue(
            BlockStored(
                block_hashes=[page.number],
                parent_block_hash=page.parent,
                token_ids=list(page.tokens),
                block_size=len(page.tokens),
                lora_id=None,
                medium=medium,
            )
        )
    made: list[Any] = recorder.take()
    return made
