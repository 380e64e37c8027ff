# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a request are stored, and when."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from flexkv import KVCache, Transfer
from flexkv.adapter.engine import Describe, EngineRequest
from flexkv.adapter.groups import Group, Groups, Reach
from flexkv.adapter.guard import Edge
from flexkv.adapter.keys import BlockKeys
from flexkv.adapter.orders import CopyOrder, StepOrders
from flexkv.adapter.request import NEVER, TrackedRequest
from flexkv.adapter.request_options import Wishes, pin_owner


class _Candidate(NamedTuple):
    """A FlexKV block that could be stored: its group, its position there, its engine blocks."""

    group: Group
    position: int
    engine_blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Running:
    """A store under way, which outlives its request.

    Attributes:
        transfer: the core's.
        request_id: whose blocks it reads.
        engine_blocks: vLLM's blocks that it reads.
    """

    transfer: Transfer
    request_id: str
    engine_blocks: frozenset[int]


class Stores:
    """The stores of one engine's requests.

    vLLM may give the blocks that a store reads to another request before the store has ended: their
    request ended, was preempted, or has left them behind its window. Workers then wait for the
    store before anything is written there: it is fenced.

    Full attention stores every block. Of what looks back less far, only what a later request can
    use is stored: what is needed to go on at the end of the prompt and where another request's
    prompt went on differently. Of an answer, whose end is not known, it is all; and of a model
    without full attention, which nothing else tells where prompts part.

    Args:
        cache: of the engine.
        groups: of the model.
        keys: of its blocks.
        edge: where errors of single requests end.
        describe: for events; None if nobody listens.
    """

    def __init__(
        self,
        cache: KVCache,
        groups: Groups,
        keys: BlockKeys,
        *,
        edge: Edge,
        describe: Describe | None,
    ) -> None:
        self._cache = cache
        self._groups = groups
        self._keys = keys
        self._edge = edge
        self._describe = describe
        self._align = groups.alignment
        self._by_reach = sorted(groups.members, key=lambda group: group.reach is not Reach.ALL)
        self._keeps_windows = all(group.reach is not Reach.ALL for group in groups.members)
        self._running: dict[int, _Running] = {}

    @property
    def under_way(self) -> int:
        """Stores that have not ended."""
        return len(self._running)

    def first_fill(self, wishes: Wishes) -> int:
        """`next_fill` of a request of which nothing was considered yet."""
        return self._align if wishes.store or wishes.pin else NEVER

    def add_filled(self, tracked: TrackedRequest, computed_tokens: int, orders: StepOrders) -> None:
        """Order stores of the blocks that are full once `computed_tokens` are computed.

        Speculative decoding computes guesses, too, and asynchronous scheduling counts tokens that
        nobody has seen yet. A block has a hash when the request has all its tokens for good, and
        none of those is computed again: a step scheduled from then on leaves the block as it is.
        """
        request = tracked.request
        stop = computed_tokens // self._align * self._align
        for group, table in zip(self._groups.members, tracked.engine_blocks, strict=False):
            hashed = len(request.block_hashes) * self._keys.hash_tokens
            has = len(table) // group.engine_blocks * group.block_tokens
            stop = min(stop, hashed // self._align * self._align)
            if group.reach is not Reach.STATE:
                stop = min(stop, has // self._align * self._align)
        start = tracked.next_fill - self._align
        if stop <= start or not tracked.engine_blocks:
            return
        tracked.next_fill = stop + self._align
        with self._edge.guard("storing blocks", "they are not cached"):
            self._store(tracked, list(self._filled(tracked, start, stop)), orders)

    def add_states(
        self,
        tracked: TrackedRequest,
        offers: Iterable[tuple[int, int, int]],
        orders: StepOrders,
    ) -> None:
        """Order stores of recurrent states.

        Args:
            tracked: whose they are.
            offers: vLLM's: a group's index, the block that has a state after this step, and the
                number of tokens that it is the state of.
            orders: of the step.
        """
        if tracked.next_fill == NEVER:
            return
        members = {group.index: group for group in self._groups.members}
        found = [
            _Candidate(members[index], tokens // members[index].block_tokens - 1, (block,))
            for index, block, tokens in offers
            if index in members and tokens % self._align == 0
        ]
        with self._edge.guard("storing states", "they are not cached"):
            self._store(tracked, found, orders)

    def ended(self, transfer: Transfer) -> None:
        """A store's transfer has ended."""
        self._running.pop(transfer.id, None)

    def fence(self, engine_blocks: Iterable[int], orders: StepOrders) -> None:
        """Something is written to these blocks from this step on: workers first wait for the stores
        that read them."""
        written = set(engine_blocks)
        orders.fences.extend(
            transfer_id
            for transfer_id, running in self._running.items()
            if not running.engine_blocks.isdisjoint(written)
        )

    def fence_all(self, orders: StepOrders) -> None:
        """It is not known what is written to from this step on."""
        orders.fences.extend(self._running)

    def discard(self, engine_blocks: Iterable[int]) -> None:
        """These blocks are overwritten before workers can wait for the stores that read them: what
        those store is never found."""
        written = set(engine_blocks)
        for running in self._running.values():
            if not running.engine_blocks.isdisjoint(written):
                self._cache.discard(running.transfer)

    def hold(self, request_id: str, orders: StepOrders) -> bool:
        """Whether stores still read the blocks of a request that has ended: workers then say when
        they do no more."""
        reading = [i for i, each in self._running.items() if each.request_id == request_id]
        if reading:
            orders.releases[request_id] = reading
        return bool(reading)

    def _filled(self, tracked: TrackedRequest, start: int, stop: int) -> Iterable[_Candidate]:
        """Blocks that were filled between `start` and `stop` tokens and are stored at once, but for
        those that vLLM may have given to others as it scheduled this step: they were filled in an
        earlier one and left behind since."""
        computed = tracked.request.num_computed_tokens
        for group, table in zip(self._groups.members, tracked.engine_blocks, strict=True):
            if group.reach is Reach.STATE:
                continue
            first = max(start // group.block_tokens, group.first_needed(computed))
            for position in range(first, stop // group.block_tokens):
                all_wanted = group.reach is Reach.ALL or self._keeps_windows
                if all_wanted or self._is_wanted(tracked, group, position):
                    yield _candidate(group, table, position)

    def _is_wanted(self, tracked: TrackedRequest, group: Group, position: int) -> bool:
        """Whether a later request can use this block of a group that looks back less far."""
        prompt = tracked.request.num_prompt_tokens
        end = (position + 1) * group.block_tokens
        if end > prompt // self._align * self._align:
            return True
        ends = {prompt // self._align, (prompt - 1) // self._align, tracked.junction // self._align}
        return any(
            group.first_needed(last * self._align) <= position and end <= last * self._align
            for last in ends
        )

    def _store(
        self, tracked: TrackedRequest, candidates: Sequence[_Candidate], orders: StepOrders
    ) -> None:
        if not candidates:
            return
        keys, places = self._chains(tracked.request, candidates)
        positions = [i for i in self._cache.missing(keys) if i in places]
        if positions and tracked.wishes.store:
            self._begin(tracked, places, keys, positions, orders)
        wishes = tracked.wishes
        if wishes.pin:
            owner = pin_owner(tracked.request, wishes)
            self._cache.pin([keys[i] for i in places], owner, wishes.pin_seconds)

    def _chains(
        self, request: EngineRequest, candidates: Sequence[_Candidate]
    ) -> tuple[list[bytes], dict[int, _Candidate]]:
        """Keys of those of `candidates` that vLLM still has, each behind that of the block that it
        builds on; and where each of them is.

        What looks back less far is worth nothing without full attention's last block, and needs
        none of its own that comes before what a hit needs.
        """
        keys: list[bytes] = []
        places: dict[int, _Candidate] = {}
        for group in self._by_reach:
            blocks = [
                each for each in candidates if each.group is group and all(each.engine_blocks)
            ]
            if not blocks:
                continue
            blocks.sort(key=attrgetter("position"))
            start, stop = max(0, blocks[0].position - 1), blocks[-1].position + 1
            own = self._keys.of(request, group, start, stop)
            if group.reach is Reach.ALL and start < blocks[0].position:
                keys.append(own[0])
            for each in blocks:
                places[len(keys)] = each
                keys.append(own[each.position - start])
        return keys, places

    def _begin(
        self,
        tracked: TrackedRequest,
        places: Mapping[int, _Candidate],
        keys: Sequence[bytes],
        positions: Sequence[int],
        orders: StepOrders,
    ) -> None:
        transfer = self._cache.store(keys, positions)
        if transfer is None:
            return
        with contextlib.ExitStack() as undo:
            undo.callback(self._cache.cancel, transfer)
            stored = [(places[i], keys[i]) for i in positions[: len(transfer.blocks)]]
            engine_blocks = [block for each, _ in stored for block in each.engine_blocks]
            order = CopyOrder(
                transfer.id,
                transfer.cell,
                engine_blocks,
                transfer.slots,
                built_on=tracked.built_on,
            )
            self._running[transfer.id] = _Running(transfer, tracked.id, frozenset(engine_blocks))
            orders.stores.append(order)
            undo.pop_all()
        if self._describe is not None:
            for each, key in stored:
                self._describe(tracked.request, each.group, ((each.position, key),))


def _candidate(group: Group, table: Sequence[int], position: int) -> _Candidate:
    step = group.engine_blocks
    return _Candidate(group, position, table[position * step : (position + 1) * step])
