# SPDX-License-Identifier: Apache-2.0
"""A worker of the engine without a model: it calls the connector and nothing else, so FlexKV behind
vLLM's own connector hears of no more than that passes on."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ranks import LOADS_FIRST, Rank, assert_worker_at_rest, ended_transfers, step_result
from texts import Text
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from flexkv_vllm import pages
from flexkv_vllm.compat import patches
from packages.inside_adapters import mover_of, set_mover, worker_of
from packages.late_mover import LateMover


def flexkv_of(connector: Any) -> Any:
    """FlexKV's connector: this one, or the one behind a connector of vLLM's."""
    inner = getattr(connector, "_connectors", [connector])[-1]
    return getattr(inner, "_flexkv_connector", inner)


@dataclass(slots=True, kw_only=True)
class ConnectorRank(Rank):
    """A rank that drives a connector as vLLM's model runner does. With `defers_saves` vLLM lets
    stores begin only when it has asked what has ended, as with speculative decoding."""

    connector: KVConnectorBase_V1
    defers_saves: bool = False

    @property
    def flexkv(self) -> Any:
        return flexkv_of(self.connector)

    @property
    def side(self) -> Any:
        return worker_of(self.flexkv)

    def register(self) -> None:
        """Meet the other ranks, which do so in other threads: what vLLM keeps for a process is kept
        for this thread."""
        _HERE.connector, _HERE.number, _HERE.stage = self.connector, self.number, self.stage
        self.connector.register_kv_caches(self.pages)

    def run(
        self, output: SchedulerOutput, texts: Mapping[str, Text], weights: bytes
    ) -> ModelRunnerOutput:
        connector = self.connector
        metadata = output.kv_connector_metadata
        assert metadata is not None
        connector.handle_preemptions(metadata)
        self.follow_tables(output)
        connector.bind_connector_metadata(metadata)
        context: Any = None
        before = LOADS_FIRST or output.has_sync_kv_loads
        if before:
            connector.start_load_kv(context)
        self.forward(output, texts, weights)
        if not before:
            connector.start_load_kv(context)
        deferred = self.defers_saves and output.total_num_scheduled_tokens > 0
        if not deferred and (self.saves_idle or output.total_num_scheduled_tokens):
            connector.wait_for_save()
        ended = ended_transfers(connector, output.finished_req_ids)
        bad_blocks = connector.get_block_ids_with_load_errors()
        for block, message in self.wrong.values():
            assert block in bad_blocks, message
        result = step_result(
            output,
            **ended,
            invalid_block_ids=bad_blocks,
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        if deferred:
            connector.wait_for_save()
        connector.clear_connector_metadata()
        return result

    def slow_down(
        self, rng: random.Random, polls: tuple[int, int], failure_rate: float
    ) -> list[LateMover]:
        late = LateMover(mover_of(self.side), rng, polls, failure_rate)
        set_mover(self.side, late)
        return [late]

    def wait_for_layer(self, name: str) -> None:
        self.connector.wait_for_layer_load(name)

    def assert_at_rest(self) -> None:
        assert_worker_at_rest(self.flexkv)

    def shutdown(self) -> None:
        self.connector.shutdown()


_HERE = threading.local()


def each_thread_is_a_worker() -> Any:
    """While it is entered, `ConnectorRank.register` can be called in several threads."""
    within = contextlib.ExitStack()
    within.enter_context(
        mock.patch.multiple(patches, get_kv_transfer_group=lambda: _HERE.connector)
    )
    within.enter_context(
        mock.patch.multiple(
            pages,
            get_tp_group=lambda: SimpleNamespace(rank_in_group=_HERE.number),
            get_pp_group=lambda: SimpleNamespace(rank_in_group=_HERE.stage),
        )
    )
    return within
