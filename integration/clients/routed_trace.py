# SPDX-License-Identifier: Apache-2.0
"""A trace behind Dynamo's KV router, with and without the events of tiers below the engines' own:
`python -m integration.clients.routed_trace TRACE`.

The router is the real one, and so is its index of blocks. The workers are models: each has an own
cache, host memory and a disk, all of which evict the block used longest ago, and emits vLLM's
events. The prompts of a worker are computed one after the other. Times are those of the model.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import heapq
import json
import random
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from integration.clients.dynamo import DynamoRouter
from integration.clients.environment import python
from integration.harness.ports import hold_port

_ROOT = Path(__file__).parents[2]
_BLOCK_TOKENS = 512
"""Of the traces."""
_ROUTED_TOKENS = 16
"""Tokens by which the router knows a block of the trace."""
_TOPIC = b"kv-events"
_MEDIA = ("GPU", "CPU", "STORAGE")
_FOLLOW_SECONDS = 0.01
"""Pause in which the router follows the events of a request."""
_PREFILL_RATE = 20_000.0
_READ_RATES = (1e9, 400_000.0, 50_000.0)
"""Tokens a second that are computed, and that each tier gives."""
_TOKEN_SECONDS = 0.02
_HIT_SHARE = 0.9
CASES = {
    "events of all tiers": (0.75, 0.25),
    "the engines' own events": (0.0, 0.0),
}
"""Weights of hits in host memory and on disk: Dynamo's defaults, and none."""


class Request(NamedTuple):
    """A request of the trace.

    Attributes:
        seconds: when it comes.
        blocks: numbers of the blocks of its prompt, each of which stands for a prefix.
        tokens: of its prompt.
        output: tokens of its answer.
    """

    seconds: float
    blocks: Sequence[int]
    tokens: int
    output: int


@dataclass
class Outcome:
    """What a case has shown.

    Attributes:
        known: blocks of prompts that some worker has had before.
        found: those that the chosen worker had.
        returning: requests of whose prompt at least half was known.
        hits: those of them that found nine tenths of that.
        waits: seconds to the first token, of the returning requests.
        wrong: prompts of which the router knew something else than the workers had.
    """

    known: int = 0
    found: int = 0
    returning: int = 0
    hits: int = 0
    waits: list[float] = field(default_factory=list)
    wrong: int = 0


class Tier:
    """Blocks, the one used longest ago first."""

    def __init__(self, medium: str, size: int) -> None:
        self.medium = medium
        self._size = size
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def use(self, blocks: Sequence[int]) -> list[Any]:
        """A request uses these blocks, which are there afterwards. Returns the events."""
        events: list[Any] = []
        start = 0
        while start < len(blocks):
            stop = start
            while stop < len(blocks) and blocks[stop] not in self:
                stop += 1
            if stop > start:
                events.append(_stored(blocks, start, stop, self.medium))
            start = stop + 1
        for block in reversed(blocks):  # the end of a prefix leaves first
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        gone = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._size)]
        if gone:
            events.append(BlockRemoved([_hash(each) for each in gone], medium=self.medium))
        return events


class Worker:
    """A model of an engine.

    Args:
        number: of the worker.
        sizes: blocks of its own cache, host memory and disk.
        events: address of its events.
    """

    def __init__(self, number: int, sizes: Sequence[int], events: str) -> None:
        self._number = number
        self.tiers = [Tier(*each) for each in zip(_MEDIA, sizes, strict=True)]
        self.free_at = 0.0
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.bind(events)
        self._sent = 0

    def found(self, blocks: Sequence[int]) -> list[int]:
        """How many blocks of the prompt, from the first on, come from each tier."""
        counts = [0, 0, 0]
        for block in blocks:
            tier = next((i for i, each in enumerate(self.tiers) if block in each), None)
            if tier is None:
                break
            counts[tier] += 1
        return counts

    def run(self, request: Request, blocks: Sequence[int], now: float) -> float:
        """Compute a request, after those before it. Returns when its first token is there."""
        counts = self.found(blocks)
        computed = max(1, request.tokens - sum(counts) * _BLOCK_TOKENS)
        seconds = computed / _PREFILL_RATE + sum(
            count * _BLOCK_TOKENS / rate for count, rate in zip(counts, _READ_RATES, strict=True)
        )
        self.free_at = max(self.free_at, now) + seconds
        events = [event for tier in self.tiers for event in tier.use(blocks)]
        batch = KVEventBatch(ts=time.time(), events=events, data_parallel_rank=self._number)
        number = self._sent.to_bytes(8, "big")
        self._socket.send_multipart([_TOPIC, number, msgspec.msgpack.encode(batch)])
        self._sent += 1
        return self.free_at

    def close(self) -> None:
        """Emit nothing more."""
        self._socket.close(linger=0)


def read_requests(path: Path, most: int) -> list[Request]:
    """The first requests of a trace in Mooncake's form."""
    packed = path.read_bytes()
    text = gzip.decompress(packed) if path.suffix == ".gz" else packed
    read = [json.loads(line) for line in text.splitlines()]
    read.sort(key=lambda each: each["timestamp"])
    start = read[0]["timestamp"]
    return [
        Request(
            (each["timestamp"] - start) / 1000,
            each["hash_ids"],
            each["input_length"],
            each["output_length"],
        )
        for each in read[:most]
    ]


def replay(
    requests: Sequence[Request],
    weights: tuple[float, float],
    sizes: Sequence[int],
    workers: int,
) -> Outcome:
    """Send the requests where the router says.

    Args:
        requests: in the order of their times.
        weights: of hits in host memory and on disk.
        sizes: blocks of each worker's own cache, host memory and disk.
        workers: how many there are.
    """
    outcome, seen = Outcome(), set[int]()
    coming: list[tuple[float, str, str]] = []
    with contextlib.ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        ports = [ending.enter_context(hold_port()).getsockname()[1] for _ in range(workers)]
        events = [f"tcp://127.0.0.1:{port}" for port in ports]
        ran = [Worker(number, sizes, address) for number, address in enumerate(events)]
        for each in ran:
            ending.callback(each.close)
        router = ending.enter_context(
            DynamoRouter(
                python(),
                (_TOPIC.decode(), _ROUTED_TOKENS, *weights, *events),
                folder / "router.log",
            )
        )
        _await_events(router, ran)
        for number, request in enumerate(requests):
            while coming and coming[0][0] <= request.seconds:
                _, what, name = heapq.heappop(coming)
                router.ask(**{what: name})
            blocks = request.blocks[: max(1, request.tokens // _BLOCK_TOKENS)]
            chosen, _ = router.ask(route=_tokens(blocks), id=str(number))
            known = next((i for i, b in enumerate(blocks) if b not in seen), len(blocks))
            found = min(known, sum(ran[chosen].found(blocks)))
            first = ran[chosen].run(request, blocks, request.seconds)
            heapq.heappush(coming, (first, "computed", str(number)))
            ended = first + request.output * _TOKEN_SECONDS
            heapq.heappush(coming, (ended, "ended", str(number)))
            seen.update(blocks)
            outcome.known += known
            outcome.found += found
            if 2 * known >= len(blocks):
                outcome.returning += 1
                outcome.hits += found >= _HIT_SHARE * known
                outcome.waits.append(first - request.seconds)
            time.sleep(_FOLLOW_SECONDS)
        for request in random.Random(1).sample(list(requests), min(50, len(requests))):
            outcome.wrong += not _knows(router, ran, request.blocks)
    return outcome


def _await_events(router: DynamoRouter, workers: Sequence[Worker]) -> None:
    """Have each worker emit events until the router follows them."""
    for number, worker in enumerate(workers):
        for attempt in range(1, 100):
            block = -(100 * number + attempt)
            worker.run(Request(0.0, [block], 1, 0), [block], 0.0)
            time.sleep(0.2)
            if any(router.ask(known=_tokens([block])).get(str(number), [0])):
                break
        else:
            raise RuntimeError(f"the router receives no events of worker {number}")
        worker.free_at = 0.0


def _knows(router: DynamoRouter, workers: Sequence[Worker], blocks: Sequence[int]) -> bool:
    """Whether the router knows what each worker's own cache has of a prompt."""
    known = router.ask(known=_tokens(blocks))
    return all(
        known.get(str(number), [0])[0] == _prefix(worker.tiers[0], blocks)
        for number, worker in enumerate(workers)
    )


def _prefix(tier: Tier, blocks: Sequence[int]) -> int:
    return next((i for i, block in enumerate(blocks) if block not in tier), len(blocks))


def _hash(block: int) -> int:
    return (block + 1_000_000) * 1_000_003


def _tokens(blocks: Sequence[int]) -> list[int]:
    return [
        (block + 1_000_000) * _ROUTED_TOKENS + i for block in blocks for i in range(_ROUTED_TOKENS)
    ]


def _stored(blocks: Sequence[int], start: int, stop: int, medium: str) -> Any:
    return BlockStored(
        block_hashes=[_hash(each) for each in blocks[start:stop]],
        parent_block_hash=_hash(blocks[start - 1]) if start else None,
        token_ids=_tokens(blocks[start:stop]),
        block_size=_ROUTED_TOKENS,
        lora_id=None,
        medium=medium,
        lora_name=None,
    )


def _rows(outcome: Outcome) -> Iterator[str]:
    waits = sorted(outcome.waits)
    share = 100 * outcome.hits / max(1, outcome.returning)
    yield f"{outcome.hits} of {outcome.returning} returning requests hit ({share:.1f} %)"
    yield f"{100 * outcome.found / max(1, outcome.known):.1f} % of known blocks found"
    mean = sum(waits) / max(1, len(waits))
    last = waits[len(waits) * 99 // 100] if waits else 0.0
    yield f"first token after {mean:.2f} s on average, 99 % within {last:.2f} s"
    yield f"the router was wrong about {outcome.wrong} of 50 prompts"


def main() -> None:
    """Replay a trace in each case, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--sizes", type=int, nargs=3, default=(500, 1000, 4000), help="blocks of the three tiers"
    )
    args = parser.parse_args()
    requests = read_requests(args.trace, args.requests)
    for name, weights in CASES.items():
        outcome = replay(requests, weights, args.sizes, args.workers)
        print(f"{name}: " + "; ".join(_rows(outcome)), flush=True)


if __name__ == "__main__":
    main()
