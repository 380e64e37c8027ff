# SPDX-License-Identifier: Apache-2.0
"""Checks of shared stores: their clients, and whether they answer."""

from __future__ import annotations

from collections.abc import Iterator

from flexkv.preflight.findings import Finding, Level
from flexkv.settings import CacheConfig
from flexkv.tiers.shared_store import SharedStore


def check_store(config: CacheConfig, store: SharedStore) -> Iterator[Finding]:
    """Check whether the servers of a store answer. Joins and writes nothing."""
    name = store.medium.value
    for text, change in store.advice(config):
        yield Finding(name, Level.ADVICE, text, change)
    for server, ask in store.probes(config):
        try:
            ask()
        except OSError as error:
            change = "an engine starts without it, and uses it once it answers: start it, or "
            change += "correct its address and credentials"
            yield Finding(name, Level.PROBLEM, f"{server} cannot be used: {error}", change)
        else:
            yield Finding(name, Level.OK, f"{server} answers")
