# SPDX-License-Identifier: Apache-2.0
"""vLLM as a campaign needs it. Sizes are such that blocks come, go and return all the time."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from integration.campaign import plugin
from integration.campaign.clients import Wire
from integration.campaign.counts import Counts
from integration.campaign.engine import DISK, ORDERS
from integration.campaign.faults import DRAWN, Hit, Kind
from integration.campaign.prompts import Question, make_prompts, with_answers
from integration.campaign.stores import SharedStores
from integration.campaign.sums import Sizes, between, check_bytes, check_failures, check_queries
from integration.campaign.verdict import Check, OnFailedLoad
from integration.harness import connector
from integration.harness.checkpoint import TINY, write_checkpoint
from integration.harness.config import EngineConfig
from integration.harness.connector import NONE, Connector
from integration.harness.server import Server

ENGINE_BLOCK, BLOCK = 32, 64
BLOCK_BYTES = BLOCK * TINY.kv_bytes_per_token
MODEL_TOKENS = 2048
"""Of the longest request."""
KV_TOKENS = 4 * MODEL_TOKENS
"""Of the engine's own cache: less than eight clients want at times, so that requests leave the
running batch."""
_ARENA_SLOTS, _DISK_SLOTS = 90, 260
"""Of some 380 blocks that the prompts have: host memory holds a quarter, the disk two thirds."""


class VllmServer(Server):
    """vLLM's own server."""

    def step(self) -> None:
        self.generate(range(ENGINE_BLOCK // 2))

    def forget(self) -> None:
        self.reset_prefix_cache(external=False)

    def forget_all(self) -> None:
        self.try_reset(external=True)


class Vllm:
    """See `Engine`. Its policies are those of `kv_load_failure_policy`.

    Args:
        forked: forks its servers; see `EngineConfig`.
    """

    policies: Mapping[str, OnFailedLoad] = {
        "recompute": OnFailedLoad.COMPUTES,
        "fail": OnFailedLoad.FAILS_ONE,
    }
    kinds: Sequence[Kind] = DRAWN
    prefix = "vllm:"
    taken_out = "num_preemptions_total"
    block_bytes = BLOCK_BYTES
    hit_tokens = BLOCK
    blocks_of_hit = 1

    def __init__(self, *, forked: bool = False) -> None:
        self._forked = forked
        self.wire = Wire("/inference/v1/generate", _body, _tokens)

    def reference(self, folder: Path, seed: int) -> list[Question]:
        config = _config(folder, NONE, 1, self._forked)

        def answer(prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
            choice = server.choice(prompt, count, logprobs=2)
            return choice["token_ids"], [
                _lead(token["top_logprobs"]) for token in choice["logprobs"]["content"]
            ]

        with VllmServer(config, folder / "reference.log", None) as server:
            return with_answers(make_prompts(seed), answer)

    def starter(
        self,
        folder: Path,
        own_folder: Path,
        policy: str,
        ranks: int,
        stores: SharedStores | None,
    ) -> Callable[[Path], VllmServer]:
        options = tiers(own_folder, stores) | {"block_tokens": BLOCK}
        computes = self.policies[policy] is OnFailedLoad.COMPUTES
        chosen = connector.plugin(recompute=computes, **options)
        config = _config(folder, chosen, ranks, self._forked)
        path = config.environment()["PYTHONPATH"]
        env = plugin.install(own_folder / "plugin", own_folder / ORDERS, path)
        config = replace(config, env=env | (stores.environ if stores else {}))
        return lambda log: VllmServer(config, log, None)

    def warnings(self, log: str) -> Iterable[str]:
        return re.findall(r"(?:WARNING|ERROR) .*\[FlexKV\] (.*)", log)

    def check(
        self,
        counts: Counts,
        given: Counter[Kind],
        hits: Sequence[Hit],
        policy: str,
        ranks: int,
    ) -> Iterable[Check]:
        sizes = Sizes(
            engine_block_bytes=ENGINE_BLOCK * TINY.kv_bytes_per_token,
            block_bytes=BLOCK_BYTES,
            engine_block_tokens=ENGINE_BLOCK,
            ranks=ranks,
        )
        yield from check_failures(counts, given, hits, in_parts=False)
        yield from check_tokens(counts, MODEL_TOKENS)
        yield from check_queries(counts)
        # With recompute, loads begin before all of their blocks are there; what does not come is
        # not loaded.
        all_loaded = self.policies[policy] is OnFailedLoad.FAILS_ONE
        yield from check_bytes(counts, hits, sizes, all_loaded=all_loaded, in_parts=False)


def check_tokens(counts: Counts, longest: int) -> Iterable[Check]:
    """FlexKV's queries and hits are those that vLLM counts, with requests of `longest` tokens."""
    queries = counts.value("flexkv_query_tokens_total", tier="host")
    asked = counts.value("external_prefix_cache_queries_total")
    found = counts.value("external_prefix_cache_hits_total")
    # vLLM leaves out what it asks for again after a preemption.
    again = counts.value("num_preemptions_total") * longest
    yield between("queries of host memory, and vLLM's", queries, asked, asked + again)
    yield between("hits of all tiers, and vLLM's", counts.hit_tokens(), found, found + again)


def tiers(own_folder: Path, stores: SharedStores | None) -> dict[str, Any]:
    """FlexKV's settings of a campaign in this folder: host memory, a disk and perhaps stores."""
    return {
        "cpu_cache_gb": _gigabytes(_ARENA_SLOTS),
        "runtime_dir": str(own_folder / "run"),
        "ssd_cache_gb": _gigabytes(_DISK_SLOTS),
        "ssd_cache_dir": str(own_folder / DISK),
    } | (stores.settings if stores else {})


def _config(folder: Path, chosen: Connector, ranks: int, forked: bool) -> EngineConfig:
    return EngineConfig(
        model=write_checkpoint(TINY, folder),
        dtype=TINY.dtype,
        connector=chosen,
        max_model_len=MODEL_TOKENS,
        max_num_batched_tokens=512,
        block_size=ENGINE_BLOCK,
        kv_cache_bytes=KV_TOKENS * TINY.kv_bytes_per_token // ranks,
        tensor_parallel_size=ranks,
        prefix_caching=chosen is not NONE,
        forked=forked,
    )


def _gigabytes(slots: int) -> float:
    """A size in GiB with room for so many blocks, and for what is kept beside them."""
    return 1.01 * slots * BLOCK_BYTES / (1 << 30) + 1e-4


def _body(question: Question, params: Mapping[str, int] | None) -> dict[str, Any]:
    return {
        "token_ids": list(question.prompt),
        "sampling_params": {
            "max_tokens": len(question.answer),
            "temperature": 0,
            "ignore_eos": True,
        },
        "kv_transfer_params": params,
    }


def _tokens(text: str) -> list[int]:
    tokens: list[int] = json.loads(text)["choices"][0]["token_ids"]
    return tokens


def _lead(top: list[dict[str, float]]) -> float:
    best, second = sorted((each["logprob"] for each in top), reverse=True)[:2]
    return best - second
