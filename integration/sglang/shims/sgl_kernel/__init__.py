# SPDX-License-Identifier: Apache-2.0
"""In place of SGLang's compiled kernels, of which PyPI has no build for CPUs."""

from __future__ import annotations

from typing import Any

import torch

from . import operators


def assign_req_to_token_pool_cpu(  # noqa: PLR0917  (called by position)
    requests: torch.Tensor,
    req_to_token: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    row_length: int,
) -> None:
    """Write the slots of several requests, one after the other, into their rows of the table.

    Args:
        requests: row of each request, shape (requests,).
        req_to_token: the table, shape (rows, row_length); written.
        starts, ends: first and last-plus-one column of each request, shape (requests,).
        slots: the KV slots of all requests, shape (sum of ends - starts,).
        row_length: columns of the table.
    """
    begin = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        taken = slots[begin : begin + end - start]
        req_to_token[row, start:end] = taken.to(req_to_token.dtype)
        begin += end - start


def __getattr__(name: str) -> Any:
    """Other kernels can be imported, as SGLang does on CPUs, and not be called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not there (integration/sglang/shims)")

    return missing


operators.define()
