# SPDX-License-Identifier: Apache-2.0
"""Load behind Dynamo's KV router while workers are killed:
`python -m integration.clients.dynamo_campaign --minutes 10`.

More conversations than the engines' own caches hold return again and again. Every answer must be
the one of the first time, when all of it was computed, and every request must end. Two frontends
take turns: the router of one counts what FlexKV has, that of the other only vLLM's own blocks.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from integration.campaign.counts import Counts
from integration.clients.dynamo_deployment import ENGINE_BLOCK, Deployment, RefusedError
from integration.clients.worded_model import write_worded_model
from integration.interrupts import interrupt_at_sigterm

ROUTERS = {
    "FlexKV's tiers count": (),
    "vLLM's own blocks count": (
        *("--router-host-cache-hit-weight", "0"),
        *("--router-disk-cache-hit-weight", "0"),
    ),
}
_WORDS = 1024
_PROMPT_WORDS = 1600
_ANSWER_WORDS = 6
_HIT_SHARE = 0.9
_GIB = 1 << 30


@dataclass
class Seen:
    """What clients have seen. Any thread may add to it.

    Attributes:
        asked: requests that were answered, by router.
        hits: those of them of whose prompt at least nine tenths were not computed.
        refused: requests that ended with an error.
        wrong: answers that differ from the first one.
        hung: requests without an answer.
        errors: the texts of errors, and how often each came.
    """

    asked: Counter[int] = field(default_factory=Counter)
    hits: Counter[int] = field(default_factory=Counter)
    refused: int = 0
    wrong: list[int] = field(default_factory=list)
    hung: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Campaign:
    """Clients, and a hand that kills workers.

    Args:
        deployment: what is asked.
        prompts: the conversations.
        seed: decides who asks what.
    """

    def __init__(self, deployment: Deployment, prompts: Sequence[str], seed: int) -> None:
        self._deployment = deployment
        self._prompts = prompts
        self._seed = seed
        self._answers: list[str] = []
        self._stop = threading.Event()
        self.seen = Seen()
        self.restarts: list[int] = []

    def compute(self) -> None:
        """Ask for each prompt for the first time."""
        for prompt in self._prompts:
            found = self._deployment.complete(0, prompt, _ANSWER_WORDS)
            if found.cached_tokens:
                raise RuntimeError("a prompt was not computed at the first time")
            self._answers.append(found.text)

    def run(self, seconds: float, clients: int, workers: int) -> None:
        """Clients ask for so long, while one worker after the other is killed and started again."""
        threads = [threading.Thread(target=self._ask, args=(each,)) for each in range(clients)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        victim = 0
        while time.monotonic() < end - 60.0:
            if self._stop.wait(20.0):
                break
            self._deployment.kill_worker(victim)
            self._deployment.await_workers(workers - 1)  # Dynamo notices it after a while
            self._deployment.start_worker(victim)
            self._deployment.await_workers(workers)
            self.restarts.append(victim)
            victim = (victim + 1) % workers
        self._stop.wait(max(0.0, end - time.monotonic()))
        self._stop.set()
        for thread in threads:
            thread.join()

    def _ask(self, client: int) -> None:
        rng = random.Random(self._seed * 100 + client)
        seen = self.seen
        while not self._stop.is_set():
            number, router = rng.randrange(len(self._prompts)), rng.randrange(len(ROUTERS))
            try:
                found = self._deployment.complete(router, self._prompts[number], _ANSWER_WORDS)
            except RefusedError as error:
                with seen.lock:
                    seen.refused += 1
                    seen.errors[str(error)[:120]] += 1
                time.sleep(0.5)
                continue
            except TimeoutError:
                with seen.lock:
                    seen.hung += 1
                continue
            with seen.lock:
                seen.asked[router] += 1
                seen.hits[router] += found.cached_tokens >= _HIT_SHARE * _PROMPT_WORDS
                if found.text != self._answers[number]:
                    seen.wrong.append(number)


def main() -> int:
    """Run it and return the exit status: 0 if no answer was wrong, no request hung, and a worker
    loaded blocks from its disk after it was killed."""
    parser = argparse.ArgumentParser(prog="python -m integration.clients.dynamo_campaign")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--folder", type=Path, help="keep logs and files there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flexkv-dynamo-") as made:
        folder = options.folder or Path(made)
        model = write_worded_model(folder / "model", _WORDS)
        rng = random.Random(options.seed)
        prompts = [
            " ".join(f"w{rng.randrange(3, _WORDS)}" for _ in range(_PROMPT_WORDS))
            for _ in range(options.conversations)
        ]
        prompt_bytes = model.kv_bytes_per_token * _PROMPT_WORDS
        settings = {
            # A third of the conversations in each worker's memory, and all on its disk.
            "FLEXKV_CPU_CACHE_GB": f"{prompt_bytes * len(prompts) / 3 / _GIB:.4f}",
            "FLEXKV_SSD_CACHE_GB": f"{3 * prompt_bytes * len(prompts) / _GIB:.4f}",
            "FLEXKV_ALWAYS_LOAD": "true",
        }
        with Deployment(
            options.python,
            model.path,
            folder,
            frontends=list(ROUTERS.values()),
            workers=options.workers,
            blocks=5 * -(-_PROMPT_WORDS // ENGINE_BLOCK),
            settings=settings,
        ) as deployment:
            for number in range(options.workers):
                deployment.start_worker(number)
            deployment.await_workers(options.workers)
            campaign = Campaign(deployment, prompts, options.seed)
            campaign.compute()
            campaign.run(60 * options.minutes, options.clients, options.workers)
            from_disk = [
                Counts(deployment.metrics(number), "vllm:").value(
                    "flexkv_hit_tokens_total", tier="disk"
                )
                for number in range(options.workers)
            ]
    return report(campaign, from_disk)


def report(campaign: Campaign, from_disk: Sequence[float]) -> int:
    """Print what was seen, and return the exit status."""
    seen = campaign.seen
    for router, name in enumerate(ROUTERS):
        asked, hits = seen.asked[router], seen.hits[router]
        print(f"{name}: {hits} of {asked} returning requests hit ({hits / max(1, asked):.1%})")
    print(f"workers killed and started again: {len(campaign.restarts)}")
    print(f"tokens from disk since the last start, by worker: {[int(each) for each in from_disk]}")
    print(f"refused: {seen.refused} {dict(seen.errors.most_common(3))}")
    print(f"wrong: {len(seen.wrong)}, hung: {seen.hung}")
    restored = all(from_disk[number] > 0 for number in set(campaign.restarts))
    return 0 if not seen.wrong and not seen.hung and restored and campaign.restarts else 1


if __name__ == "__main__":
    interrupt_at_sigterm()
    sys.exit(main())
