# SPDX-License-Identifier: Apache-2.0
"""A vLLM worker extension that reads and damages KV blocks.

vLLM mixes ``KVProbe`` into its worker class (``worker_extension_cls``), so the methods run in
every worker process, between two steps, through ``collective_rpc``. Tests use it to prove that
wrong bytes change the tokens, and to compare restored blocks byte by byte with computed ones.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch


class KVProbe:
    """Methods added to the worker."""

    model_runner: Any
    _probe_seen: dict[str, list[int]]

    def keeps_weights_record(self) -> None:
        """From now on remember which blocks every request had in its last step. Idempotent."""
        if hasattr(self, "_probe_seen"):
            return
        self._probe_seen = {}
        runner, execute = self.model_runner, self.model_runner.execute_model

        def execute_and_record(*args: Any, **kwargs: Any) -> Any:
            output = execute(*args, **kwargs)
            for request_id, request in runner.requests.items():
                (blocks,) = request.block_ids  # one group of layers
                self._probe_seen[request_id] = list(blocks)
            return output

        runner.execute_model = execute_and_record

    def keeps_weights_blocks(self, request_prefix: str) -> list[int]:
        """Block numbers, in order, of the one recorded request whose id has that prefix.

        vLLM appends a random suffix to request ids. Raises KeyError unless exactly one fits.
        """
        found = [rid for rid in self._probe_seen if rid.startswith(request_prefix)]
        if len(found) != 1:
            raise KeyError(f"{len(found)} requests start with {request_prefix!r}")
        return self._probe_seen[found[0]]

    def keeps_weights_digests(self, blocks: list[int]) -> list[str]:
        """Digest of the bytes of each block over all layers of this rank."""
        caches = self._probe_caches()
        digests = []
        for block in blocks:
            digest = hashlib.blake2b(digest_size=16)
            for cache in caches:
                digest.update(_bytes_of(cache[block]).numpy().tobytes())
            digests.append(digest.hexdigest())
        return digests

    def keeps_weights_offloading_jobs(self) -> int:
        """Copies of vLLM's OffloadingConnector that this rank has not ended."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector: Any = get_kv_transfer_group()
        worker = connector.connector_worker
        return len(worker._unsubmitted_store_jobs) + len(worker.worker._jobs)

    def keeps_weights_block_bytes(self) -> int:
        """Bytes of one block of one layer of this rank."""
        cache = self._probe_caches()[0]
        return int(cache[0].numel() * cache.element_size())

    def keeps_weights_read(self, blocks: list[int], layers: list[int]) -> list[str]:
        """Bytes of blocks as hex, for ``keeps_weights_write``: block by block, layer by layer."""
        caches = self._probe_caches()
        return [
            _bytes_of(caches[layer][block]).numpy().tobytes().hex()
            for block in blocks
            for layer in layers
        ]

    def keeps_weights_write(self, blocks: list[int], layers: list[int], pages: list[str]) -> None:
        """Put back what ``keeps_weights_read`` of the same blocks and layers gave."""
        caches = self._probe_caches()
        places = [caches[layer][block] for block in blocks for layer in layers]
        for page, data in zip(places, pages, strict=True):
            _overwrite(page, torch.frombuffer(bytearray.fromhex(data), dtype=torch.uint8))

    def keeps_weights_flip(self, block: int, layer: int, offset: int, mask: int) -> None:
        """XOR one byte of a block with ``mask``.

        ``offset`` is in bytes within the layer's block, in the logical order of the tensor.
        """
        page = self._probe_caches()[layer][block]
        data = _bytes_of(page)
        data[offset] = int(data[offset]) ^ mask
        _overwrite(page, data)

    def keeps_weights_zero_row(self, block: int, layers: list[int], row: int) -> None:
        """Zero K and V of one token of a block: ``row`` counts its tokens."""
        caches = self._probe_caches()
        for layer in layers:
            caches[layer][block].select(-2, row).zero_()

    def keeps_weights_copy(self, source: int, target: int, layers: list[int]) -> None:
        """Overwrite block ``target`` with the bytes of block ``source``."""
        caches = self._probe_caches()
        for layer in layers:
            caches[layer][target].copy_(caches[layer][source])

    def keeps_weights_scrub(self) -> None:
        """Overwrite every block with a pattern, once no request runs.

        A block that was freed keeps its bytes, and the next request may get just that block. So
        without this a load that copies nothing at all could go unnoticed.
        """
        for cache in self._probe_caches():
            # Finite, because attention may multiply rows that it does not use by zero.
            cache.fill_(7.0)

    def _probe_caches(self) -> list[torch.Tensor]:
        caches: list[torch.Tensor] = list(self.model_runner.kv_caches)
        return caches


def _bytes_of(page: torch.Tensor) -> torch.Tensor:
    """A flat uint8 copy of a page, in logical order whatever its strides are."""
    return page.contiguous().clone().view(torch.uint8).flatten()


def _overwrite(page: torch.Tensor, data: torch.Tensor) -> None:
    page.copy_(data.view(page.dtype).view(page.shape))
