# SPDX-License-Identifier: Apache-2.0
"""Keeps copies off the KV pages of a vLLM that sleeps.

vLLM's allocator unmaps the pages when the engine sleeps at level 1 or 2, or gives their memory
back. A copy that reads or writes an unmapped page ends the device's context, and one that begins
after the wake-up reads bytes that nobody computed. From 0.33 on, vLLM reports both to connectors,
but neither to its own FlexKVConnectorV1 nor to an offloading worker.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

from flexkv_vllm.compat.patches import call_around_sleep


class Suspendable(Protocol):
    """What copies between vLLM's pages and FlexKV's memory; the names are vLLM's of 0.33. Neither
    method raises."""

    def unregister_kv_caches(self) -> None:
        """Begin no copy from now on, and return once none reads or writes the pages."""

    def restore_kv_caches(self) -> None:
        """Copies may begin again."""


_followers: WeakSet[Suspendable] = WeakSet()


def follow_sleep(copies: Suspendable) -> None:
    """Suspend `copies`, which is held weakly, whenever the pages of this process have no memory."""
    _followers.add(copies)
    call_around_sleep(_suspend, _resume)


def _suspend() -> None:
    for copies in list(_followers):
        copies.unregister_kv_caches()


def _resume() -> None:
    for copies in list(_followers):
        copies.restore_kv_caches()
