# SPDX-License-Identifier: Apache-2.0
"""Which part of a page a rank holds, and which ranks share their pages.

Ranks whose pages differ have a pool of the service each. With latent attention (MLA) the ranks hold
the same pages, which SGLang lets only one of them write. They share a pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexkv.types.errors import ConfigError

_OF_EVERY_RANK = {"mamba"}
"""Pools that differ between ranks even if the KV does not. Every rank writes them."""


@dataclass(frozen=True, slots=True)
class Place:
    """The ranks of a process, as HiCache numbers them from 0.

    Attributes:
        tp: tensor-parallel rank, and the number of such ranks.
        pp: stage of the pipeline, and the number of stages.
        cp: rank within attention's context parallelism, and the number of such ranks.
        replicated: whether the tensor-parallel ranks hold the same KV.
        copies: engines with the same model beside each other (data parallelism).
    """

    tp: tuple[int, int]
    pp: tuple[int, int]
    cp: tuple[int, int]
    replicated: bool
    copies: int

    @classmethod
    def of(cls, config: Any, copies: int) -> Place:
        """Read the ranks from HiCache's configuration. Raises ConfigError if a kind of parallelism
        is not supported."""
        shards = getattr(config, "dcp_size", 1)
        if shards != 1:
            raise ConfigError(f"SGLang's --dcp-size is {shards}; allowed with FlexKV: 1")
        return cls(
            tp=(config.tp_rank, config.tp_size),
            pp=(config.pp_rank, config.pp_size),
            cp=(config.attn_cp_rank, config.attn_cp_size),
            replicated=bool(config.is_mla_model),
            copies=copies,
        )

    def shares(self, pool: str) -> bool:
        """Whether the tensor-parallel ranks hold the same pages of a pool."""
        return self.replicated and pool not in _OF_EVERY_RANK

    def traits(self, pool: str) -> list[str]:
        """The ranks that a page of a pool depends on, for the fingerprint."""
        tp = "all" if self.shares(pool) else self.tp
        return [f"tp {tp}", f"pp {self.pp}", f"cp {self.cp}"]

    def owners(self, pool: str) -> int:
        """How many different pages the ranks of one engine hold of a pool under one key."""
        return (1 if self.shares(pool) else self.tp[1]) * self.pp[1] * self.cp[1]

    def owner(self, pool: str) -> int:
        """The number of this rank's among these pages."""
        tp, ranks = (0, 1) if self.shares(pool) else self.tp
        return (self.pp[0] * self.cp[1] + self.cp[0]) * ranks + tp
