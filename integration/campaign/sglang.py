# SPDX-License-Identifier: Apache-2.0
"""SGLang with FlexKV's linker as a campaign needs it, with the sizes of vLLM's campaign."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integration.campaign.clients import Wire
from integration.campaign.counts import Counts
from integration.campaign.faults import DRAWN, Hit, Kind
from integration.campaign.prompts import Question, make_prompts, with_answers
from integration.campaign.stores import SharedStores
from integration.campaign.sums import Sizes, check_bytes, check_failures, check_queries
from integration.campaign.verdict import Check, OnFailedLoad
from integration.campaign.vllm import BLOCK, BLOCK_BYTES, KV_TOKENS, tiers
from integration.harness.checkpoint import TINY, write_checkpoint
from integration.harness.families import write_family
from integration.sglang.environment import python
from integration.sglang.linker import linker_config
from integration.sglang.server import ServerConfig, SglangServer


@dataclass(frozen=True, slots=True)
class Family:
    """A model of another kind than Llama.

    Attributes:
        name: see `families`.
        block_bytes: of a page of full attention; the same is a slot.
        parts: slots that its other pages take for each page of a hit, at most.
        least_bytes: of such a slot; 0 if all are alike.
        hit_tokens: see `Engine`.
        flags: of the server.
    """

    name: str
    block_bytes: int
    parts: int
    least_bytes: int = 0
    hit_tokens: int = BLOCK
    flags: Mapping[str, Any] = field(default_factory=dict)


WINDOWS = Family("mellum", BLOCK_BYTES, 2)
STATES = Family("qwen3_5", BLOCK * 512, 18, 6144, 64, {"max_mamba_cache_size": 64})
"""A state has 16 parts of 6,144 bytes and 2 of 6,912. SGLang keeps those behind multiples of 64
tokens of a chunk."""

_EAGER = 0.2
"""Of SGLang's `schedule_conservativeness`: it admits requests for whose answers it may have no
room, and takes some out of the running batch when the room ends."""


class Tested(SglangServer):
    """SGLang's own server."""

    def step(self) -> None:
        self.generate(range(BLOCK // 2), 1)

    def forget(self) -> None:
        self.flush()

    def forget_all(self) -> None:
        raise NotImplementedError("SGLang has no call that forgets what FlexKV has")


class Sglang:
    """See `Engine`. SGLang ends all requests of a batch that load if one of them cannot.

    Args:
        forked: forks its servers; see `ServerConfig`.
        family: the model; None for Llama's.
        stages: of a pipeline.
    """

    policies: Mapping[str, OnFailedLoad] = {"fail": OnFailedLoad.FAILS_BATCH}
    kinds: Sequence[Kind] = tuple(kind for kind in DRAWN if kind is not Kind.RESET)
    prefix = "sglang:"
    taken_out = "num_retracted_requests_total"

    def __init__(
        self, *, forked: bool = False, family: Family | None = None, stages: int = 1
    ) -> None:
        self._forked = forked
        self._stages = {"pp_size": stages} if stages > 1 else {}
        self._family = family
        self._flags = dict(family.flags) if family else {}
        # As many layers on each stage.
        self._spec = TINY if stages == 1 else dataclasses.replace(TINY, layers=2 * stages)
        self.block_bytes = family.block_bytes if family else BLOCK * self._spec.kv_bytes_per_token
        self.hit_tokens = family.hit_tokens if family else BLOCK
        self.blocks_of_hit = 1 + family.parts if family else 1
        self.wire = Wire("/generate", _body, _tokens)

    def reference(self, folder: Path, seed: int) -> list[Question]:
        model = self._model(folder)
        flags = self._flags | {"disable_radix_cache": True}
        config = ServerConfig(
            model,
            self._spec,
            page_size=BLOCK,
            kv_tokens=KV_TOKENS,
            forked=self._forked,
            flags=flags,
        )

        def answer(prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
            given = server.generate(prompt, count, return_logprob=True, top_logprobs_num=2)
            tops = given.meta["output_top_logprobs"]
            return given.tokens, [best[0] - second[0] for best, second in tops]

        with SglangServer(config, folder / "reference.log") as server:
            return with_answers(make_prompts(seed), answer)

    def starter(
        self,
        folder: Path,
        own_folder: Path,
        policy: str,
        ranks: int,
        stores: SharedStores | None,
    ) -> Callable[[Path], Tested]:
        model = self._model(folder)
        options = tiers(own_folder, stores)
        environ = {f"FLEXKV_{name.upper()}": str(value) for name, value in options.items()}
        config = linker_config(
            model,
            self._spec,
            environ | (stores.environ if stores else {}),
            own_folder,
            page_size=BLOCK,
            kv_tokens=KV_TOKENS,
            tensor_parallel_size=ranks,
            forked=self._forked,
            flags=self._flags | self._stages | {"schedule_conservativeness": _EAGER},
        )
        return lambda log: Tested(config, log)

    def _model(self, folder: Path) -> Path:
        if self._family is None:
            return write_checkpoint(self._spec, folder)
        written = folder / self._family.name
        return written if written.is_dir() else write_family(self._family.name, folder, python())

    def warnings(self, log: str) -> Iterable[str]:
        return re.findall(r"\[FlexKV\] (.*)", log)

    def check(
        self,
        counts: Counts,
        given: Counter[Kind],
        hits: Sequence[Hit],
        policy: str,
        ranks: int,
    ) -> Iterable[Check]:
        least = self._family.least_bytes if self._family else 0
        shards = ranks * self._stages.get("pp_size", 1)
        sizes = Sizes(self.block_bytes, self.block_bytes, BLOCK, shards, least)
        in_shares = self._family is not None
        yield from check_failures(counts, given, hits, in_parts=True, in_shares=in_shares)
        yield from check_queries(counts)
        # A load may be cancelled before it begins, and a part of one may fail.
        yield from check_bytes(
            counts, hits, sizes, all_loaded=False, in_parts=True, blocks_of_hit=self.blocks_of_hit
        )


def _body(question: Question, params: Mapping[str, int] | None) -> dict[str, Any]:
    return {
        "input_ids": list(question.prompt),
        "sampling_params": {
            "max_new_tokens": len(question.answer),
            "temperature": 0.0,
            "ignore_eos": True,
        },
    }


def _tokens(text: str) -> list[int]:
    tokens: list[int] = json.loads(text)["output_ids"]
    return tokens
