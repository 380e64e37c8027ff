# SPDX-License-Identifier: Apache-2.0
"""Which part of a page a process holds, and which folder it belongs into.

A folder on disk has one owner. Ranks whose pages differ have folders of their own. Of ranks that
hold the same pages, as with latent attention (MLA), SGLang has one write: that one owns the folder,
and the others read in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexkv.errors import ConfigError

_OF_EVERY_RANK = {"mamba"}
"""Pools that differ between ranks also where the KV does not, and that every rank writes."""


@dataclass(frozen=True, slots=True)
class Place:
    """Ranks of a process, as HiCache counts them.

    Attributes:
        tp: rank among those that share out heads, and their number.
        pp: stage of the pipeline, and their number.
        cp: rank among those that share out the tokens of a page, and their number.
        replicated: whether the ranks of `tp` hold the same KV.
        copies: engines with the same model beside each other (data parallelism).
    """

    tp: tuple[int, int]
    pp: tuple[int, int]
    cp: tuple[int, int]
    replicated: bool
    copies: int

    @classmethod
    def of(cls, config: Any, copies: int) -> Place:
        """The place that HiCache's `HiCacheStorageConfig` says.

        Raises:
            ConfigError: pages are shared out in a way that is not supported.
        """
        shards = getattr(config, "dcp_size", 1)
        if shards != 1:
            raise ConfigError(f"SGLang's dcp_size is {shards}; allowed with FlexKV: 1")
        return cls(
            tp=(config.tp_rank, config.tp_size),
            pp=(config.pp_rank, config.pp_size),
            cp=(config.attn_cp_rank, config.attn_cp_size),
            replicated=bool(config.is_mla_model),
            copies=copies,
        )

    def shares(self, pool: str) -> bool:
        """Whether the ranks of `tp` hold the same pages of a pool."""
        return self.replicated and pool not in _OF_EVERY_RANK

    def follows(self, pool: str) -> bool:
        """Whether this rank only reads what another one writes."""
        return self.shares(pool) and self.tp[0] > 0

    def traits(self, pool: str) -> list[str]:
        """What tells pages of this rank from those of others."""
        tp = "all" if self.shares(pool) else self.tp
        return [f"tp {tp}", f"pp {self.pp}", f"cp {self.cp}"]

    def owners(self, pool: str) -> int:
        """Ranks of one engine that own a folder for a pool."""
        return (1 if self.shares(pool) else self.tp[1]) * self.pp[1] * self.cp[1]
