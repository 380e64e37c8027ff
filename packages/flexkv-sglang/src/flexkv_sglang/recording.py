# SPDX-License-Identifier: Apache-2.0
"""Reports SGLang's requests to a recorder."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

from flexkv.engine.recorder import Recorder


class RequestRecorder:
    """Records the requests of one engine, on the rank that decides. Single-threaded.

    Args:
        recorder: records them; owned.
        page_size: tokens of a block.
    """

    def __init__(self, recorder: Recorder, page_size: int) -> None:
        self._recorder = recorder
        self._page_size = page_size

    def began(
        self, rid: str, prompt_tokens: int, own_tokens: int, hit_tokens: int, session: str
    ) -> None:
        """See `Recorder.scheduled`. If SGLang computes a prompt in chunks, the recorder keeps the
        first chunk's figures."""
        self._recorder.scheduled(rid, prompt_tokens, own_tokens, hit_tokens, session)

    def ended(self, request: Any) -> None:
        """Report the end of a request, an object of SGLang."""
        prompt, answer = request.origin_input_ids, request.output_ids
        # SGLang does not compute the last token of an answer.
        tokens = len(prompt) + max(0, len(answer) - 1)
        blocks, tenant = tokens // self._page_size, str(request.extra_key or "")
        names = partial(_names, prompt, answer, blocks, self._page_size, tenant.encode())
        self._recorder.ended(request.rid, len(answer), blocks, names)

    def close(self) -> None:
        """Close the recorder."""
        self._recorder.close()


def _names(
    prompt: Sequence[int], answer: Sequence[int], blocks: int, size: int, tenant: bytes
) -> Iterator[bytes]:
    """A name for each block: its tokens and its tenant."""
    tokens = chain(prompt, answer)
    for _ in range(blocks):
        yield array("q", islice(tokens, size)).tobytes() + tenant
