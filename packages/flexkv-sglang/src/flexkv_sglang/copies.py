# SPDX-License-Identifier: Apache-2.0
"""Loads and stores that SGLang has ordered and that are under way."""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.adapter.orders import CopyOrder
from flexkv.transfer.copies import Transfer


@dataclass(slots=True)
class QueuedLoad:
    """A load that begins with the next batch.

    Attributes:
        order: the copy, the same on all ranks.
        transfer: the load with its leases; None on all ranks but the first, which decides.
    """

    order: CopyOrder
    transfer: Transfer | None


@dataclass(slots=True)
class Offload:
    """A store that SGLang has ordered. SGLang asks for the ends of stores in its calls' order.

    Attributes:
        transfer: the store under way; None if nothing is copied, and on all ranks but the first.
        stored: whether the cache has all pages of the store, once `transfer` ends without failure.
    """

    transfer: Transfer | None
    stored: bool
