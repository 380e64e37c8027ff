# SPDX-License-Identifier: Apache-2.0
"""Shared stores below an engine under test, and what goes wrong with them."""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from integration.campaign.counts import Counts
from integration.campaign.faults import IN_STORES, Kind
from integration.campaign.verdict import Check
from integration.harness.mooncake_lender import MooncakeLender
from integration.harness.mooncake_master import MooncakeMaster
from integration.harness.s3_server import BUCKET, S3Server
from integration.harness.store_process import StoreProcess

_SEGMENT_GB = 1 / 8
"""Several times what all prompts and answers have."""
_QUESTION_SECONDS = 0.25
"""The stores share their cores with the engine and its clients, and late questions open circuits:
with FlexKV's defaults, a few milliseconds, a busy machine would use no store."""
_PREFIX = "cache"
_BLOCKS = f"{_PREFIX}/blocks/"
_DAMAGED = 24
"""Objects that are damaged at once: enough to be met."""
TIERS = ("mooncake", "objects")


class SharedStores:
    """Mooncake Store, whose blocks are in the memory of a node without an engine, and a bucket
    below it. A context manager that ends their processes.

    Attributes:
        kinds: of faults that come.
    """

    kinds: Sequence[Kind] = tuple(kind for kind in Kind if kind in IN_STORES)

    def __init__(self) -> None:
        with contextlib.ExitStack() as started:
            self._master = started.enter_context(MooncakeMaster(segment_gb=_SEGMENT_GB))
            self._lender = started.enter_context(MooncakeLender(self._master.settings))
            self._server = started.enter_context(S3Server())
            self._started = started.pop_all()
        self._hanging: Mapping[Kind, StoreProcess] = {
            Kind.MASTER_HANGS: self._master,
            Kind.LENDER_HANGS: self._lender,
            Kind.BUCKET_HANGS: self._server,
        }
        self._killed: Mapping[Kind, StoreProcess] = {
            Kind.MASTER_KILLED: self._master,
            Kind.LENDER_KILLED: self._lender,
            Kind.BUCKET_KILLED: self._server,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    @property
    def settings(self) -> dict[str, Any]:
        """Of FlexKV."""
        return self._master.settings | {
            "mooncake_segment_gb": 0,
            "mooncake_question_seconds": _QUESTION_SECONDS,
            "objects_url": f"s3://{BUCKET}/{_PREFIX}",
            "objects_question_seconds": _QUESTION_SECONDS,
        }

    @property
    def environ(self) -> dict[str, str]:
        """What the engine's environment needs."""
        return self._server.environ

    def do(
        self, kind: Kind, seconds: float, rng: random.Random, pause: Callable[[float], None]
    ) -> None:
        """Let something go wrong.

        Args:
            kind: what.
            seconds: for how long, if it passes.
            rng: chooses what is damaged.
            pause: waits for so many seconds.
        """
        if kind in self._hanging:
            self._hanging[kind].pause()
            pause(seconds)
            self._hanging[kind].go_on()
        elif kind in self._killed:
            self._killed[kind].kill()
            pause(seconds)
            self._killed[kind].restart()
        elif kind is Kind.LENT_DAMAGED:
            self._lender.damage(_some(self._master.names(), rng))
        else:
            self._server.damage(_some(self._server.paths(_BLOCKS), rng))

    def empty_mooncake(self) -> None:
        """Leave all blocks to the bucket."""
        self._lender.kill()
        self._lender.restart()

    def damage_all(self) -> None:
        """No object of either store is whole any more."""
        self._lender.damage(self._master.names())
        self._server.damage(self._server.paths(_BLOCKS))


def check_stores(counts: Counts) -> Iterable[Check]:
    """Each store brought blocks, and damaged ones were found."""
    for tier, tokens in hit_tokens(counts).items():
        yield Check(f"blocks came from {tier}", tokens > 0, f"{tokens} tokens")
    for tier, blocks in damaged_blocks(counts).items():
        yield Check(f"damaged blocks of {tier} are found", blocks > 0, f"{blocks} blocks")


def hit_tokens(counts: Counts) -> Mapping[str, int]:
    """Tokens that came from each store."""
    return {tier: counts.value("flexkv_hit_tokens_total", tier=tier) for tier in TIERS}


def damaged_blocks(counts: Counts) -> Mapping[str, int]:
    """Blocks of each store that FlexKV found damaged."""
    return {
        tier: counts.value("flexkv_failures_total", cause="damaged", tier=tier) for tier in TIERS
    }


def mooncake_works() -> bool:
    """Whether Mooncake Store is installed, with the libraries that it needs."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError:
        return False
    return True


def closed(counts: Counts) -> bool:
    """Whether all stores are read from and written to."""
    states = [
        counts.value("flexkv_circuits", tier=tier, direction=direction, state="closed")
        for tier in TIERS
        for direction in ("read", "write")
    ]
    return all(states)


def _some(names: Sequence[str], rng: random.Random) -> list[str]:
    return rng.sample(sorted(names), min(_DAMAGED, len(names)))
