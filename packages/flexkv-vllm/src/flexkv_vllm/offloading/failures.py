# SPDX-License-Identifier: Apache-2.0
"""How vLLM hears that a load failed.

`OffloadingConnector` takes every load for a success. vLLM's model runner, though, asks each
connector after each step what could not be loaded, and its scheduler then fails those requests or
computes them anew, as `kv_load_failure_policy` says. So the connector's answers to those questions
are completed here. Where that is not possible and a load fails, the worker ends: no token may be
computed over bytes that are not there.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import OffloadingWorker

from flexkv_vllm.compat.patches import (
    answer_bad_blocks,
    answer_failed_requests,
    connectors_here,
    request_of_load,
)


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
        for connector in connectors_here():
            ours = getattr(connector, "connector_worker", None)
            if (
                isinstance(connector, OffloadingConnector)
                and ours is not None
                and ours.worker is worker
            ):
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
            self._requests.add(request_of_load(worker, job_id))

    def _complete(self, connector: OffloadingConnector) -> None:
        if self._by_block:
            answer_bad_blocks(connector, self._take_blocks)
        else:
            answer_failed_requests(connector, self._take_requests)

    def _take_blocks(self) -> set[int]:
        blocks, self._blocks = self._blocks, set()
        return blocks

    def _take_requests(self) -> set[str]:
        requests, self._requests = self._requests, set()
        return requests
