# SPDX-License-Identifier: Apache-2.0
"""The workers of the engine without a model: they write recognisable bytes where attention would
write KV, and compare what they find where attention would read it."""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from kv_pages import BLOCK_TOKENS, LAYERS, heads_of, token_bytes
from texts import Text
from vllm.distributed.utils import get_pp_indices
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from packages.inside_adapters import assert_no_copy, worker_of
from packages.late_mover import LateMover

_STEP = inspect.signature(KVConnectorModelRunnerMixin._get_kv_connector_output)
SAVES_IDLE = "wait_for_save" not in _STEP.parameters
"""Whether this vLLM calls `wait_for_save` in steps that compute nothing."""
LOADS_FIRST = "has_sync_kv_loads" not in SchedulerOutput.__dataclass_fields__
"""Whether in this vLLM all loads begin before the forward of their step, as up to 0.28."""


@dataclass(slots=True)
class Rank(ABC):
    """One worker of `ranks` in its stage: its KV pages, and its copy of the block tables.
    `saves_idle` if vLLM waits for saves in steps that compute nothing, too."""

    number: int
    ranks: int
    windows: tuple[int, ...]
    pages: dict[str, torch.Tensor]
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    wrong: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Requests that the running step computes on wrong bytes, with the first such block."""
    checked_bytes: int = 0
    saves_idle: bool = SAVES_IDLE
    stage: int = 0
    stages: int = 1

    @abstractmethod
    def run(
        self, output: SchedulerOutput, texts: Mapping[str, Text], weights: bytes
    ) -> ModelRunnerOutput:
        """Run a step. The result has no tokens yet."""

    @abstractmethod
    def slow_down(
        self, rng: random.Random, polls: tuple[int, int], failure_rate: float
    ) -> list[LateMover]:
        """Put late movers before this rank's; returns those."""

    @abstractmethod
    def wait_for_layer(self, name: str) -> None:
        """The forward is about to compute this layer."""

    @abstractmethod
    def assert_at_rest(self) -> None:
        """No copy is under way, and nothing is kept of one."""

    @abstractmethod
    def shutdown(self) -> None:
        """End it."""

    def follow_tables(self, output: SchedulerOutput) -> None:
        """Keep up with the blocks that vLLM gave in this step."""
        for request_id in output.finished_req_ids:
            self.tables.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(blocks) for blocks in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self.tables[request_id] = [[] for _ in self.tables[request_id]]
            for table, more in zip(self.tables[request_id], blocks or (), strict=False):
                table.extend(more)

    def forward(self, output: SchedulerOutput, texts: Mapping[str, Text], weights: bytes) -> None:
        """Compute what was scheduled. `wrong` has the requests that could not be."""
        self.wrong.clear()
        guessed = output.scheduled_spec_decode_tokens
        for request_id, start, end in scheduled(output):
            tokens = texts[request_id].upto(end)
            guesses = guessed.get(request_id, [])
            tokens[end - len(guesses) :] = guesses
            for group in range(1 + len(self.windows)):
                self._forward_group(request_id, group, tokens, start, weights + bytes(group))

    def _forward_group(
        self, request_id: str, group: int, tokens: list[int], start: int, weights: bytes
    ) -> None:
        heads = heads_of(self.number, self.ranks)
        expected = token_bytes(tokens, weights)[:, :, heads]
        table = torch.tensor(self.tables[request_id][group], dtype=torch.int64)
        first = max(0, start - self.windows[group - 1] + 1) if group else 0
        positions = torch.arange(len(tokens))
        blocks, places = table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
        seen = slice(first, start)
        for layer in range(*get_pp_indices(LAYERS, self.stage, self.stages)):
            name = f"layer{group * LAYERS + layer}"
            self.wait_for_layer(name)
            pages = self.pages[name]
            there = pages[blocks[seen], :, places[seen]]
            if not torch.equal(there, expected[layer, seen]):
                differs = (there != expected[layer, seen]).flatten(1).any(dim=1)
                wrong = first + int(differs.nonzero()[0].item())
                message = (
                    f"rank {self.number}, group {group}, layer {layer}: {request_id} computes on "
                    f"at {start}, but its token {wrong} (block {blocks[wrong]}) has wrong bytes"
                )
                self.wrong.setdefault(request_id, (int(blocks[wrong]), message))
                expected = ~expected
            self.checked_bytes += there.numel()
            pages[blocks[start:], :, places[start:]] = expected[layer, start:]


def assert_worker_at_rest(connector: Any) -> None:
    """The worker side of FlexKV's connector copies nothing, and knows nothing of any request."""
    assert connector.get_finished(set()) == (None, None)
    assert_no_copy(worker_of(connector))


def scheduled(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    """The step's requests, each with the tokens computed before and after it."""
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [
        (request_id, computed[request_id], computed[request_id] + count)
        for request_id, count in output.num_scheduled_tokens.items()
    ]


def step_result(output: SchedulerOutput, **told: Any) -> ModelRunnerOutput:
    """What a worker returns, without tokens; `told` by its connector."""
    request_ids = [request_id for request_id, _, _ in scheduled(output)]
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
        sampled_token_ids=[[] for _ in request_ids],
        kv_connector_output=KVConnectorOutput(**told),
    )


def ended_transfers(connector: Any, finished: set[str]) -> dict[str, set[str]]:
    """What a worker's output tells of transfers that have ended, as this vLLM asks for it."""
    ask = getattr(connector, "get_transfer_results", None)  # since 0.30
    if ask is None:
        sent, received = connector.get_finished(finished)
        return {"finished_sending": sent, "finished_recving": received}
    results = ask(finished)
    return {
        "finished_sending": results.finished_sending,
        "finished_recving": results.finished_recving,
        "failed_recving": results.failed_recving,
    }
