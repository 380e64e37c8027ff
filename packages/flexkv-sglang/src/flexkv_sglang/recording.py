# SPDX-License-Identifier: Apache-2.0
"""Reports SGLang's requests to a recorder, from the batches in which it computes them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

from flexkv.adapter.recorder import Recorder

_LOOK_SECONDS = 1.0
"""Seconds between two checks for ended requests. A check costs one call per running request. Not
tuned."""


class BatchRecorder:
    """Records the requests of one engine, on the rank that decides. Single-threaded.

    Args:
        recorder: records them; owned.
        page_size: tokens of a block.
    """

    def __init__(self, recorder: Recorder, page_size: int) -> None:
        self._recorder = recorder
        self._page_size = page_size
        self._running: dict[str, Any] = {}
        self._looked = time.monotonic()

    def batch(self, requests: Sequence[Any], loaded: dict[str, int]) -> None:
        """Report the batch that SGLang computes next.

        Args:
            requests: SGLang's requests of the batch; borrowed until they end.
            loaded: tokens loaded for each request, by id; the batch's requests are removed from it.
        """
        for request in requests:
            # If SGLang computes a prompt in chunks, the recorder keeps the first chunk's figures.
            hit = loaded.pop(request.rid, 0)
            self._running[request.rid] = request
            own = max(0, request.prefix_len - hit)
            prompt = len(request.origin_input_ids)
            self._recorder.scheduled(request.rid, prompt, own, hit, "")
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._end([each for each in self._running.values() if each.finished()])

    def close(self) -> None:
        """Report the end of all requests and close the recorder."""
        self._end(list(self._running.values()))
        self._recorder.close()

    def _end(self, requests: Sequence[Any]) -> None:
        for request in requests:
            del self._running[request.rid]
            prompt, answer = request.origin_input_ids, request.output_ids
            # SGLang does not compute the last token of an answer.
            tokens = len(prompt) + max(0, len(answer) - 1)
            blocks, tenant = tokens // self._page_size, str(request.extra_key or "")
            names = partial(_names, prompt, answer, blocks, self._page_size, tenant.encode())
            self._recorder.ended(request.rid, len(answer), blocks, names)


def _names(
    prompt: Sequence[int], answer: Sequence[int], blocks: int, size: int, tenant: bytes
) -> Iterator[bytes]:
    """A name for each block: its tokens and its tenant."""
    tokens = chain(prompt, answer)
    for _ in range(blocks):
        yield array("q", islice(tokens, size)).tobytes() + tenant
