# SPDX-License-Identifier: Apache-2.0
"""Turns requests with known token ids into blocks."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flexkv.plan.trace import Prefixes, Trace, TracedRequest

_NAME_BYTES = 8
"""Bytes of a block's name. Among a million blocks that follow the same block, the chance that two
share a name is below 10^-7."""

LEAST_TOKEN, MOST_TOKEN = 0, (1 << 31) - 1


@dataclass(slots=True)
class _Request:
    """A request and its answer so far.

    Attributes:
        seconds: time of its arrival, in seconds.
        prompt_tokens: tokens of its prompt.
        tokens: the last tokens of prompt and answer, which do not fill a block yet.
        session: name of its conversation.
        names: names of its complete blocks.
        output_tokens: tokens of its answer.
    """

    seconds: float
    prompt_tokens: int
    tokens: array[int]
    session: str
    names: list[bytes] = field(default_factory=list)
    output_tokens: int = 0


class TokenRequests:
    """Collects requests and their answers. Keeps digests of their blocks, and no complete block's
    tokens.

    Args:
        block_tokens: tokens of a block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._requests: list[_Request] = []
        self._by_id: dict[str, _Request] = {}

    def add(
        self, request_id: str, seconds: float, prompt: Sequence[int], session: str = ""
    ) -> None:
        """Add a request.

        Args:
            request_id: id of the request; empty if its answer is unknown.
            seconds: time of its arrival, in seconds.
            prompt: ids of at least one token, each from 0 to 2^31 - 1.
            session: name of its conversation; empty if unknown.

        Raises:
            OverflowError: a token id is out of range.
        """
        request = _Request(seconds, len(prompt), array("i"), session)
        self._extend(request, prompt)
        self._requests.append(request)
        if request_id:
            self._by_id[request_id] = request

    def answer(self, request_id: str, tokens: Sequence[int]) -> None:
        """Append tokens to the answer of a request. Does nothing if the request is unknown.

        Raises:
            OverflowError: see `add`.
        """
        request = self._by_id.get(request_id)
        if request is not None:
            request.output_tokens += len(tokens)
            self._extend(request, tokens)

    def trace(self, name: str, form: str, skipped: Mapping[str, int]) -> Trace:
        """Make a trace of all requests so far, in the order of their arrival.

        Args:
            name: name of the file.
            form: format of the file.
            skipped: the number of requests that are left out, by reason.
        """
        prefixes, requests = Prefixes(), []
        for each in sorted(self._requests, key=lambda request: request.seconds):
            # The engine does not compute the last token of an answer.
            total = each.prompt_tokens + max(0, each.output_tokens - 1)
            chain = prefixes.follow(each.names[: total // self._size])
            complete = each.prompt_tokens // self._size
            requests.append(
                TracedRequest(
                    each.seconds,
                    chain[:complete],
                    chain[complete:],
                    each.prompt_tokens,
                    each.output_tokens,
                    each.session,
                )
            )
        return Trace(name, form, self._size, requests, len(prefixes), skipped=skipped)

    def _extend(self, request: _Request, tokens: Sequence[int]) -> None:
        added = request.tokens + array("i", tokens)
        data, step = added.tobytes(), self._size * added.itemsize
        complete = len(data) // step * step
        for start in range(0, complete, step):
            part = data[start : start + step]
            request.names.append(hashlib.blake2b(part, digest_size=_NAME_BYTES).digest())
        request.tokens = added[complete // added.itemsize :]
