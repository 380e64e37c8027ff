# SPDX-License-Identifier: Apache-2.0
"""Loads and stores that SGLang has ordered and that have not ended."""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.adapter.orders import CopyOrder
from flexkv.transfer.copies import Transfer


@dataclass(slots=True)
class QueuedLoad:
    """A load that begins with the next batch.

    Attributes:
        order: the copy, the same on all ranks.
        transfer: the leased blocks; None on ranks that do not decide.
    """

    order: CopyOrder
    transfer: Transfer | None


@dataclass(slots=True)
class Offload:
    """A store whose end SGLang asks for, in the order of its calls.

    Attributes:
        transfer: the store under way; None if nothing is copied, and on ranks that do not decide.
        stored: whether the cache has all its pages, or will have once `transfer` ends well.
    """

    transfer: Transfer | None
    stored: bool
