# SPDX-License-Identifier: Apache-2.0
"""Start of one rank: builds the objects that SGLang calls, from its configuration and pools.

All checks run here and raise. After the start, nothing raises into SGLang.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from dataclasses import dataclass
from typing import Any

from flexkv import CacheConfig
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.choice.chooser import LoadMode
from flexkv.engine.scheduler.operator_calls import OperatorCalls
from flexkv.engine.start import make_cache, make_chooser, make_recorder, operator_access
from flexkv.engine.worker.pages import RankPages
from flexkv.engine.worker.start_worker import start_worker
from flexkv_kernels.torch_device import device_of
from flexkv_sglang.identity import model_identity, outlives_process, served_model
from flexkv_sglang.pages import Pages
from flexkv_sglang.ranks import Ranks, together
from flexkv_sglang.side import RankSide

logger = logging.getLogger("flexkv.sglang")

_ONE_PAGE = 1
"""Pages of a block. SGLang stores and looks up any run of pages and does not say where in the
prompt the run begins. The boundaries of larger blocks would therefore be unknown."""
_STORED_STEPS = 3
"""Steps whose pages may be stored before the first of them are published: the one that computes,
the one that copies, and with SGLang's overlap one more; and one for each further stage."""
_STEP_STATES = 4
"""States that a step leaves at the ends of its prompts and answers."""
_SMALL_BLOCK = 64 << 10
"""Bytes of a block below which its fixed cost exceeds the cost of copying its bytes."""
_LARGE_PAGE = 64
"""Tokens of the page size that the warning about small blocks advises. FlashMLA supports only this
size, and TensorRT-LLM's MLA kernels support no larger one."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts of SGLang that the start of a rank needs; all borrowed.

    Attributes:
        is_bigram: whether SGLang hashes pairs of tokens.
        engines: engines of the server (data parallelism), of which this is one.
        draft: SGLang's configuration of the draft model; None if no draft keeps KV.
        window: tokens that SGLang keeps of a sliding window; 0 if the model has none.
    """

    settings: Any
    model: Any
    version: str
    page_size: int
    is_bigram: bool
    engines: int = 1
    draft: Any = None
    window: int = 0


def start_rank(config: CacheConfig, engine: Engine, pages: Pages, ranks: Ranks) -> RankSide:
    """Meet the other ranks and start the mover; rank 0 makes the arena and the cache. Returns the
    side of this rank, which the caller closes.

    All ranks call this at the same time. Raises FlexKVError if the pages cannot be copied, or the
    arena or a disk cannot be opened, on this rank or on another one.

    Args:
        config: FlexKV's settings, with this engine's part of all sizes.
        pages: the pages of this rank; their tensors stay SGLang's.
        ranks: all ranks of the engine; borrowed by the side for its lifetime.
    """
    with contextlib.ExitStack() as undo:
        boundary = ErrorBoundary()
        with together(ranks):
            identity = [
                *model_identity(engine.settings, engine.model, engine.version, engine.draft),
                f"dtypes: {', '.join(pages.traits)}",
                f"pairs of tokens: {engine.is_bigram}",
                *_layers_of(pages, ranks),
            ]
            device = device_of(pages.tensors)
        engine_id = _engine_id(ranks)
        with together(ranks):
            worker = start_worker(
                config,
                engine_id,
                _rank_pages(pages, ranks),
                device,
                identity=identity,
                model=served_model(engine.settings),
                boundary=boundary,
                engines=engine.engines,
            )
            undo.callback(worker.close)
        cache = None
        is_served = worker.session.info.service is not None
        shares = True
        with together(ranks):
            if ranks.rank == 0:
                needs = config.names_lower_tier or is_served
                shares = needs and outlives_process(engine.settings, engine.draft)
                cache = make_cache(
                    config,
                    worker.session,
                    keeps_blocks=shares,
                    follows_requests=not pages.apart,
                    step_blocks=(_STORED_STEPS + ranks.stages - 1) * _step_blocks(engine, pages),
                    engines=engine.engines,
                )
                undo.callback(cache.close)
                name = worker.session.info.fingerprint
                _log_start(cache.info.num_slots, cache.info.slot_bytes, name, engine.page_size)
        (waits,) = ranks.agree([int(cache is not None and cache.info.may_fetch)], 1)
        with together(ranks):
            chooser = make_chooser(
                config,
                LoadMode.LAYERWISE,
                worker.session.arena.spec,
                cache,
                on_cores=engine.settings.device == "cpu" and ranks.stages == 1,
            )
            size = engine.page_size
            trailing = pages.trailing(-(-engine.window // size))
            side = RankSide(
                worker,
                ranks,
                cache,
                page_size=size,
                chooser=chooser,
                may_wait=bool(waits),
                trailing=trailing,
                boundary=boundary,
                recorder=None
                if cache is None
                else make_recorder(config, "sglang", size, cache.info.slot_bytes, chooser),
                options=config.request_options,
            )
            if is_served and not shares:
                # Equal keys of another engine may mean other blocks.
                side.page_keys.renew(mixed=False)
            if cache is not None and side.requests is not None:
                where = config.session_root, "sglang", worker.session.info.fingerprint
                keys = side.page_keys.of_prompts(
                    size, is_bigram=engine.is_bigram, trailing=trailing
                )
                calls = OperatorCalls(
                    cache,
                    boundary,
                    operator_access(config, keys),
                    may_begin=lambda: side.may_change,
                    poll=side.poll,
                    sessions=side.requests.sessions,
                    empty=side.empty,
                    others=trailing.keys_behind,
                )
                side.requests.figures.report_health(*where, calls.open(*where))
        undo.pop_all()
        return side


def _rank_pages(pages: Pages, ranks: Ranks) -> RankPages:
    of_stage = ranks.count // ranks.stages
    return RankPages(
        pages.layout,
        _ONE_PAGE,
        pages.sharding,
        ranks.rank % of_stage,
        ranks.stage,
        ranks.stages,
        apart=pages.apart,
    )


def _layers_of(pages: Pages, ranks: Ranks) -> list[str]:
    """The layers of a stage, for the fingerprint; empty if the stage has all layers."""
    if ranks.stages == 1:
        return []
    return [f"layers of the stage: {pages.first_layer} to {pages.first_layer + pages.layers - 1}"]


def _step_blocks(engine: Engine, pages: Pages) -> int:
    """Blocks that a step computes at most: those of a chunk of prompts, or of whole prompts where
    SGLang does not cut them; see SGLang's `chunked_prefill_size` and `max_prefill_tokens`. Of
    states, those of a usual step."""
    chunk = engine.settings.chunked_prefill_size
    tokens = int(chunk) if chunk and chunk > 0 else int(engine.settings.max_prefill_tokens)
    full = max(1, tokens // engine.page_size) * (1 + len(pages.windows))
    return full + _STEP_STATES * sum(each.parts for each in pages.states)


def _engine_id(ranks: Ranks) -> str:
    """The name of the session of this engine's ranks. Rank 0 draws it at random."""
    drawn = ranks.agree([secrets.randbits(62) for _ in range(2)], 2)
    return "sglang-" + "".join(f"{number:016x}" for number in drawn)


def _log_start(slots: int, slot_bytes: int, fingerprint: str, page_size: int) -> None:
    logger.info(
        "FlexKV caches prefixes in host memory: %d blocks of %d tokens, %.2f GiB, fingerprint %s",
        slots,
        page_size,
        slots * slot_bytes / (1 << 30),
        fingerprint,
    )
    if page_size < _LARGE_PAGE and slot_bytes < _SMALL_BLOCK:
        logger.warning(
            "SGLang's pages of %d tokens make blocks of %d bytes; FlexKV looks up and copies each "
            "block separately; --page-size %d makes this cheaper",
            page_size,
            slot_bytes,
            _LARGE_PAGE,
        )
