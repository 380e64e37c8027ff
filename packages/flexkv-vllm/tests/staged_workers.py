# SPDX-License-Identifier: Apache-2.0
"""Workers of one or several pipeline stages, which run the steps that a scheduler has made."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_pages import BLOCK_TOKENS
from ranks import Rank, scheduled
from texts import Text
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput


@dataclass(slots=True)
class Step:
    """A step that was scheduled, and its result once the workers of all stages have run it.

    Attributes:
        output: vLLM's.
        told: what workers get of it.
        ran: stages that have run it.
        results: of their workers.
        wrong: requests that some of them computed on wrong bytes.
        result: of all workers.
    """

    output: SchedulerOutput
    told: SchedulerOutput | None = None
    ran: int = 0
    results: list[ModelRunnerOutput] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)
    result: ModelRunnerOutput | None = None


class StagedWorkers:
    """The workers of a world.

    Attributes:
        ranks: of all stages.
        stages: how many there are.
        steps: that were scheduled and whose results vLLM has not had.
        texts: of the requests, by id.
        weights: of the model.
        lag: decides how far workers are behind; None where they are not.
        guesses: what draft tokens are drawn with; None without speculation.
        aggregator: vLLM's, of what the ranks report.
    """

    ranks: Sequence[Rank]
    stages: int
    steps: deque[Step]
    texts: dict[str, Text]
    weights: bytes
    lag: random.Random | None
    guesses: random.Random | None
    aggregator: KVOutputAggregator

    def _run_ahead(self) -> None:
        """Run some of what was scheduled before its result is asked for: without `lag` the first of
        several stages runs all of it."""
        if self.lag is None:
            self._run_workers(0 if self.stages == 1 else 1)
        elif self.lag.random() < 0.5:
            self._run_workers(self.lag.randint(1, self.stages))

    def _run_workers(self, stages: int) -> None:
        """Let the first `stages` run all steps that were scheduled."""
        for step in self.steps:
            while step.ran < stages:
                self._run_stage(step)

    def _run_stage(self, step: Step) -> None:
        """Let the next stage run a step."""
        if step.told is None:
            step.told = pickle.loads(pickle.dumps(step.output))
            if self.guesses is not None and self.lag is not None:
                self._guess_on_device(step.told, self.guesses)
        for rank in self.ranks:
            if rank.stage == step.ran:
                step.results.append(rank.run(step.told, self.texts, self.weights))
                step.wrong.update(rank.wrong)
        step.ran += 1
        if step.ran == self.stages:
            self._sample(step, step.told)

    def _sample(self, step: Step, output: SchedulerOutput) -> None:
        """What the last stage makes of a step that all have run."""
        last = next(i for i, rank in enumerate(self.ranks) if rank.stage == self.stages - 1)
        step.result = self.aggregator.aggregate(list(step.results), output_rank=last)
        cached = output.scheduled_cached_reqs
        for request_id, known in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            # vLLM may have thrown away what was sampled as its request was preempted.
            if request_id in cached.resumed_req_ids:
                self.texts[request_id].sampled = known
        assert step.result is not None
        told = step.result.kv_connector_output
        failed = (told and told.invalid_block_ids) or set()
        for i, (request_id, start, computed) in enumerate(scheduled(output)):
            # What is computed on a load that failed is nonsense, and vLLM must drop it. It does so,
            # too, where the right bytes were there all the same.
            table = self.ranks[last].tables[request_id][0]
            loaded_on = table[: -(-start // BLOCK_TOKENS)]
            nonsense = not failed.isdisjoint(loaded_on) or request_id in step.wrong
            guesses = output.scheduled_spec_decode_tokens.get(request_id, ())
            sampled = [0] if nonsense else self.texts[request_id].sample(computed, guesses)
            step.result.sampled_token_ids[i] = sampled

    def _guess_on_device(self, output: SchedulerOutput, rng: random.Random) -> None:
        """A step that was scheduled ahead, as the workers know it: vLLM counted all guesses of
        earlier steps as right, and left open which tokens this one guesses."""
        guessed, cached = output.scheduled_spec_decode_tokens, output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            text = self.texts[request_id]
            if request_id in cached.resumed_req_ids:
                text.sampled = cached.num_output_tokens[i]
            # The last token that was sampled is computed next.
            known = text.prompt_tokens + text.sampled
            cached.num_computed_tokens[i] = min(cached.num_computed_tokens[i], known - 1)
            if request_id in guessed:
                guessed[request_id] = text.guess(rng, len(guessed[request_id]))
