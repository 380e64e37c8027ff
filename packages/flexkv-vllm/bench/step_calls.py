# SPDX-License-Identifier: Apache-2.0
"""How many calls of FlexKV's functions a step and a request take, and in how many files.

Runs vLLM's real scheduler over the tests' world without a model and counts by `sys.setprofile`,
scheduler and worker together, for a prompt of 8 blocks. Counts do not depend on the machine.
`python packages/flexkv-vllm/bench/step_calls.py` prints the rows.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "flexkv" / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from engine_world import BLOCK_TOKENS, World, random_prompt

PROMPT_BLOCKS = 8
_SLOTS = 4 * PROMPT_BLOCKS
_READ_SECONDS = 0.05
"""A disk has read a prompt by then, and a step of a real engine has not begun. Not tuned."""
_STEP_SECONDS = 0.005
"""A step of a real engine; copies end meanwhile. Not tuned."""
_FIGURES_SECONDS = 0.11
"""A busy engine takes figures at most so often; then there are none until something happens."""
_OURS = str(Path(__file__).parents[2])
_CUTS = "BlockKeys.of"
_ORDERS = "KVCache.load"
_SEARCHES = ("lookup", "present", "missing")


class CallCount:
    """Counts calls of FlexKV's functions while `counting`.

    Attributes:
        calls: of Python functions in the packages' sources, by file and name.
        searches: of the index, by name.
        before_load: keys cut, and searches of the index, until the first load was ordered.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.searches: Counter[str] = Counter()
        self.before_load: tuple[int, int] | None = None

    @property
    def total(self) -> int:
        """Calls."""
        return self.calls.total()

    @property
    def files(self) -> int:
        """Distinct files of the functions called."""
        return len({file for file, _ in self.calls})

    def of(self, name: str) -> int:
        """Calls of the functions with this qualified name."""
        return sum(count for (_, each), count in self.calls.items() if each == name)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the calls of this thread meanwhile."""
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            if type(getattr(arg, "__self__", None)).__name__ == "BlockIndex":
                self.searches[arg.__name__] += arg.__name__ in _SEARCHES
        elif event == "call":
            code = frame.f_code
            if code.co_filename.startswith(_OURS) and "/src/" in code.co_filename:
                if code.co_qualname == _ORDERS and self.before_load is None:
                    self.before_load = self.of(_CUTS), self.searches.total()
                self.calls[code.co_filename, code.co_qualname] += 1


def run(repeats: int = 5) -> list[dict[str, Any]]:
    """Medians; the disk's answers do not always come in the same step."""
    idle = _in_world(lambda world: [_idle_step(world) for _ in range(repeats)])
    rows: dict[str, Sequence[int]] = {
        "an idle decoding step: calls": [each.total for each in idle],
        "an idle decoding step: files": [each.files for each in idle],
    }
    for place, leave, options in PLACES:
        hits = _in_world(lambda world, leave=leave: _hits(world, repeats, leave), **options)
        rows[f"match of a {place} hit: calls"] = [match.total for match, _ in hits]
        rows[f"a request with a {place} hit: calls"] = [count.total for _, count in hits]
        cuts, searches = zip(*(count.before_load or (0, 0) for _, count in hits), strict=True)
        rows[f"a {place} hit: keys cut before its load"] = cuts
        rows[f"a {place} hit: searches of the index before its load"] = searches
    return [
        {"name": name, "count": statistics.median(counts), "repeats": repeats}
        for name, counts in rows.items()
    ]


def _in_world(measure: Callable[[World], Any], **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), num_blocks=4096, slots=_SLOTS, budget=2048, **options)
        try:
            return measure(world)
        finally:
            world.close()


def _idle_step(world: World) -> CallCount:
    """A request decodes, and no block of it is full with this step."""
    request_id = world.add(random_prompt(random.Random(0), BLOCK_TOKENS), max_tokens=8)
    for _ in range(4):
        world.step()
        world.settle()
        time.sleep(_FIGURES_SECONDS)
    count = CallCount()
    with count.counting():
        world.step()
    assert len(world.outputs[request_id]) < 8
    world.run()
    return count


def _hits(
    world: World, repeats: int, leave: Callable[[World], None]
) -> list[tuple[CallCount, CallCount]]:
    """Of `repeats` requests the calls of the match that finds the hit, and all calls."""
    rng = random.Random(0)
    found = []
    for _ in range(repeats):
        prompt = random_prompt(rng, PROMPT_BLOCKS * BLOCK_TOKENS + 5)
        world.generate(prompt)
        leave(world)
        match, count = CallCount(), CallCount()
        before, world.connector.get_num_new_matched_tokens = (
            world.connector.get_num_new_matched_tokens,
            _counted(world.connector.get_num_new_matched_tokens, match, count),
        )
        with count.counting():
            request_id = world.add(prompt)
        time.sleep(_READ_SECONDS)
        while world.scheduler.has_requests():
            with count.counting():
                world.step()
            time.sleep(_STEP_SECONDS)
        world.connector.get_num_new_matched_tokens = before
        assert world.external_tokens[request_id] == PROMPT_BLOCKS * BLOCK_TOKENS
        found.append((match, count))
    return found


def _counted(call: Callable[..., Any], match: CallCount, outer: CallCount) -> Callable[..., Any]:
    """`call`, of which `match` counts the last, and `outer` all."""

    def counted(*args: Any) -> Any:
        match.calls.clear()
        with match.counting():
            answer = call(*args)
        outer.calls.update(match.calls)
        outer.searches.update(match.searches)
        match.searches.clear()
        sys.setprofile(outer._note)
        return answer

    return counted


def _forget(world: World) -> None:
    """Only FlexKV has the last prompt."""
    world.forget()


def _leave_on_disk(world: World) -> None:
    """Only the disk has the last prompt."""
    rng = random.Random(time.monotonic_ns())
    world.settle()
    for _ in range(_SLOTS // PROMPT_BLOCKS + 1):
        world.generate(random_prompt(rng, PROMPT_BLOCKS * BLOCK_TOKENS + 5), max_tokens=1)
        world.settle()
    world.forget()


PLACES: tuple[tuple[str, Callable[[World], None], dict[str, Any]], ...] = (
    ("host", _forget, {}),
    ("disk", _leave_on_disk, {"disk_slots": 8 * _SLOTS}),
)


if __name__ == "__main__":
    for row in run():
        print(f"{row['name']}: {row['count']:g}")
