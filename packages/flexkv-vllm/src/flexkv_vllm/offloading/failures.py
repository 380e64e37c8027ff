# SPDX-License-Identifier: Apache-2.0
"""How vLLM hears that a load failed.

`OffloadingConnector` takes every load for a success. vLLM's model runner, though, asks each
connector after each step what could not be loaded, and its scheduler then fails those requests or
computes them anew, as `kv_load_failure_policy` says. So the connector's answers to those questions
are completed here. Where that is not possible and a load fails, the worker ends: no token may be
computed over bytes that are not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import OffloadingWorker


class LoadFailures:
    """The failed loads of one worker.

    Args:
        groups: KV cache groups of the model. With one, vLLM is told the blocks; with several, where
            they would not say enough, the requests.
    """

    def __init__(self, groups: int) -> None:
        self._by_block = groups == 1
        self._connector: OffloadingConnector | None = None
        self._blocks: set[int] = set()
        self._requests: set[str] = set()

    def listen(self, worker: OffloadingWorker) -> None:
        """From now on vLLM hears of failed loads, if it can. To be called before the step's results
        are asked for, whenever loads are submitted."""
        if self._connector is not None:
            return
        for connector in _connectors():
            ours = connector.connector_worker
            if ours is not None and ours.worker is worker:
                self._complete(connector)
                self._connector = connector

    def report(self, job_id: int, blocks: list[int]) -> None:
        """The load `job_id` did not fill `blocks`. To be called while the connector asks for
        finished jobs.

        Raises:
            RuntimeError: this vLLM cannot handle failed loads.
        """
        worker = None if self._connector is None else self._connector.connector_worker
        if worker is None:
            raise RuntimeError(
                "a load failed, and this vLLM cannot handle failed loads; the worker ends rather "
                "than compute on missing bytes"
            )
        if self._by_block:
            self._blocks.update(blocks)
        else:
            request_id = worker._load_jobs[job_id]
            assert request_id is not None  # as it may be, from 0.33 on, where vLLM waits for a load
            self._requests.add(request_id)

    def _complete(self, connector: OffloadingConnector) -> None:
        answers: Any = connector
        if self._by_block:
            answers.get_block_ids_with_load_errors = self._take_blocks
            return
        ask = answers.get_transfer_results  # since 0.30; an older vLLM has one group here

        def transfer_results(finished_req_ids: set[str]) -> Any:
            results = ask(finished_req_ids)
            results.failed_recving |= self._requests
            self._requests = set()
            return results

        answers.get_transfer_results = transfer_results

    def _take_blocks(self) -> set[int]:
        blocks, self._blocks = self._blocks, set()
        return blocks


def _connectors() -> Iterable[OffloadingConnector]:
    """vLLM's offloading connectors of this process, those within a `MultiConnector` too."""
    found: Any = get_kv_transfer_group()
    each = getattr(found, "_connectors", [found])
    return [connector for connector in each if isinstance(connector, OffloadingConnector)]
