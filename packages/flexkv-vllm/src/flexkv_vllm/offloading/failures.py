# SPDX-License-Identifier: Apache-2.0
"""Reports failed loads to vLLM.

`OffloadingConnector` counts every load as a success. But vLLM's model runner asks each connector
after each step for failed loads, and its scheduler then fails or recomputes those requests, as
`kv_load_failure_policy` says. This module completes the connector's answers. If that is not
possible and a load fails, the worker ends: no token may be computed over missing bytes.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from flexkv_vllm.compat.patches import (
    answer_bad_blocks,
    answer_failed_requests,
    request_of_load,
)


class LoadFailures:
    """The failed loads of one worker.

    Args:
        groups: number of KV cache groups of the model. With one, failed blocks are reported to
            vLLM; with several, where blocks are not enough, the requests.
    """

    def __init__(self, groups: int) -> None:
        self._by_block = groups == 1
        self._connector: OffloadingConnector | None = None
        self._blocks: set[int] = set()
        self._requests: set[str] = set()

    def listen(self, connector: OffloadingConnector) -> None:
        """From now on, report failed loads to a connector, if this vLLM can handle them."""
        self._complete(connector)
        self._connector = connector

    def report(self, job_id: int, blocks: list[int]) -> None:
        """The load `job_id` did not fill `blocks`. Call this while the connector asks for finished
        jobs.

        Raises:
            RuntimeError: this vLLM cannot handle failed loads.
        """
        connector = self._connector
        if connector is None:
            raise RuntimeError(
                "a load failed, and this vLLM cannot handle failed loads; the worker ends rather "
                "than compute on missing bytes"
            )
        if self._by_block:
            self._blocks.update(blocks)
        else:
            self._requests.add(request_of_load(connector, job_id))

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
