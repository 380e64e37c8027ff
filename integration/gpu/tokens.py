# SPDX-License-Identifier: Apache-2.0
"""Whether a real vLLM gives the same tokens over blocks that FlexKV loaded, on this device.

A prompt is asked twice, and then once more after the engine has forgotten it: the second time the
engine takes its beginning from its own cache, the third time from FlexKV. Both times it computes
the same rest over what must be the same bytes, so even in bfloat16 the answers are the same, to the
last bit. The weights are large enough for each cached row to count. That the comparison notices one
wrong byte is tried last, on bytes that are changed in host memory.

Each engine is a unit: vLLM with its defaults, as users run it, with CUDA graphs and asynchronous
scheduling; the same without asynchronous scheduling, for layer-wise loads; and without CUDA graphs.
Their models have blocks of different kinds.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from integration.bench.rows import Goal, Row
from integration.gpu import goals
from integration.gpu.results import Log
from integration.harness import connector, processes
from integration.harness.answers import Completion, EngineStartError
from integration.harness.checkpoint import ModelSpec, write_checkpoint
from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.harness.families import VOCAB, write_family
from integration.harness.prompts import random_tokens

ASYNC, LAYERWISE = "async", "layerwise"
NEW_TOKENS = 32
TAIL = 9
"""Tokens of a prompt behind its last block: fewer than any engine block has, so that vLLM's own
cache and FlexKV have the same part of the prompt."""
DAMAGES = 4
"""Bytes that are changed, one after the other."""

_EXPONENT_BIT = 0x40
_ARENA = "flexkv-arena"

SMALL = ModelSpec(
    name="tokens",
    hidden=512,
    layers=4,
    heads=8,
    kv_heads=2,
    head_dim=128,
    intermediate=1024,
    vocab=8192,
    dtype="bfloat16",
    init_range=0.125,
)
"""Head dimension and precision are those of models that people serve. The norm of a row of weights
is that of the tests' model, whose tokens change with any row of the cache."""

WIDE = replace(SMALL, name="tokens-wide", layers=8, kv_heads=8)
ONE_HEAD = replace(SMALL, name="tokens-one-head", layers=8, kv_heads=1)
LATENT = replace(SMALL, name="deepseek_v2", vocab=VOCAB)
"""Only its vocabulary and precision count: the checkpoint is that of the family."""


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked, and of which engine.

    Attributes:
        name: of the engine, in the report.
        model: its checkpoint is made.
        block_tokens: of FlexKV, a multiple of the engine's.
        blocks: of each prompt, which is a few tokens longer.
        modes: of loads; the default of vLLM, to schedule asynchronously, allows "async" only.
        settings: further ones of FlexKV.
        engine: further fields of ``EngineConfig``.
        family: of the checkpoint, in place of the model's; see `families`.
        may_fail: whether an engine that does not start is a note, not a failure of the section.
        at_once: whether all are also asked at once, so that loads run beside steps of others. What
            a step computes then depends on the time that loads take, so only tokens are compared,
            of a model in float32, which rounds too little to change one.
    """

    name: str
    model: ModelSpec
    block_tokens: int
    blocks: tuple[int, ...]
    modes: tuple[str, ...] = (ASYNC,)
    settings: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    family: str = ""
    may_fail: bool = False
    at_once: bool = False

    @property
    def prompts(self) -> list[list[int]]:
        """Prompts of random tokens, somewhat longer than the blocks."""
        return [
            random_tokens(f"tokens {blocks}", blocks * self.block_tokens + TAIL, self.model.vocab)
            for blocks in self.blocks
        ]

    def checkpoint(self, folder: Path) -> Path:
        """Make the model's checkpoint."""
        if self.family:
            return write_family(self.family, folder)
        return write_checkpoint(self.model, folder)


_GRAPHS: dict[str, Any] = {"extra_args": {"enforce_eager": False}}
_IN_STEP: dict[str, Any] = {"async_scheduling": False}
_GIGABYTE = {"cpu_cache_gb": 1.0}
ON_GPU = (
    Questions(
        "vLLM's defaults, blocks of 8 MiB",
        WIDE,
        256,
        (1, 2, 7, 16),
        settings=_GIGABYTE,
        engine=_GRAPHS,
    ),
    Questions(
        "CUDA graphs without asynchronous scheduling, one head",
        ONE_HEAD,
        64,
        (1, 2, 7, 40),
        (ASYNC, LAYERWISE),
        _GIGABYTE,
        _GRAPHS | _IN_STEP,
    ),
    Questions(
        "no CUDA graphs, blocks of 1 MiB",
        SMALL,
        256,
        (1, 2, 7, 16, 40),
        (ASYNC, LAYERWISE),
        _GIGABYTE,
        _IN_STEP,
    ),
    Questions(
        "vLLM's defaults, float32",
        replace(SMALL, name="tokens-float32", dtype="float32"),
        256,
        (1, 2, 3, 5, 7, 12, 16, 40),
        settings=_GIGABYTE,
        engine={"extra_args": {"enforce_eager": False, "attention_backend": "TRITON_ATTN"}},
        may_fail=True,  # FlashAttention has no float32
        at_once=True,
    ),
    Questions(
        "vLLM's defaults, latent attention, pages of 64 tokens",
        LATENT,
        64,
        (1, 2, 7, 40),
        settings=_GIGABYTE,
        engine=_GRAPHS | {"block_size": 64},
        family="deepseek_v2",
        may_fail=True,  # which kernels a device and a vLLM have for it varies
    ),
)
"""Several engine blocks to a slot in all but the last, whose pages are those of DeepSeek's models.
A slot of the first has more than the 4 MiB that a segment of the smaller rings holds."""


def token_rows(log: Log) -> Iterator[Row]:
    """All rows, or none and the reason where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        log.note("vLLM is not installed: not measured")
        return
    for asked in log.units(ON_GPU, lambda asked: asked.name):
        with tempfile.TemporaryDirectory(prefix="flexkv-tokens-") as folder:
            try:
                yield from compare(asked, Path(folder), log)
            except EngineStartError as error:
                if not asked.may_fail:
                    raise
                log.note(f"{asked.name}: not measured: {error}")


def compare(asked: Questions, folder: Path, log: Log) -> Iterator[Row]:
    """Start an engine and ask.

    Raises:
        RuntimeError: an answer was to use a cache and did not, or the other way round.
    """
    load_mode = "auto" if LAYERWISE in asked.modes else ASYNC
    settings = {"load_mode": load_mode, "block_tokens": asked.block_tokens, **asked.settings}
    config = EngineConfig(
        model=asked.checkpoint(folder),
        dtype=asked.model.dtype,
        connector=connector.plugin(**settings),
        max_model_len=max(map(len, asked.prompts)) + NEW_TOKENS + 1,
        max_num_batched_tokens=8192,
        probe=True,
        **asked.engine,
    )
    with Engine(config, folder / "tokens.log") as engine:
        log.say("the engine's own cache")
        before = _arena_of(engine).read_bytes()
        computed = [_ask(engine, asked, prompt, 0) for prompt in asked.prompts]
        own = [_ask(engine, asked, prompt) for prompt in asked.prompts]
        for mode in asked.modes:
            log.say(f"loads, {mode}")
            yield from _against_own(asked, mode, _loaded(engine, asked, mode), own, computed)
        if asked.at_once:
            log.say("loads, all at once")
            yield _at_once(engine, asked, computed)
        log.say("wrong bytes")
        places = _places(before, _arena_of(engine).read_bytes(), asked.model)
        unseen = [place for place in places if not _noticed(engine, asked, place, own)]
    yield Row(
        f"wrong bytes in host memory that change no answer, {asked.name}",
        len(unseen),
        "bytes",
        Goal("<=", 0),
        f"of {len(places)}, one after the other",
    )


def _against_own(
    asked: Questions,
    mode: str,
    loaded: Sequence[Completion],
    own: Sequence[Completion],
    computed: Sequence[Completion],
) -> Iterator[Row]:
    """Answers over loaded blocks, against those over the engine's own and against computed ones."""
    what = f"answers over blocks that FlexKV loaded, {mode}, that differ from "
    detail = f"of {len(loaded)}, {NEW_TOKENS} tokens each"
    different = sum(map(differ, loaded, own))
    label = f"{what}those over the engine's own, {asked.name}"
    yield Row(label, different, "answers", goals.SAME_TOKENS, detail)
    rounded = sum(a.tokens != b.tokens for a, b in zip(loaded, computed, strict=True))
    detail += "; rounding differs, since more is computed at once"
    yield Row(f"{what}computed ones, {asked.name}", rounded, "answers", None, detail)


def _at_once(engine: Engine, asked: Questions, computed: Sequence[Completion]) -> Row:
    """Tokens over loaded blocks where all prompts are asked at once, against computed ones. If
    those over the engine's own cache differ, too, then rounding counts, and the row has no goal."""
    different = []
    for _ in ("own", "loaded"):
        found = engine.generate_many(asked.prompts, max_tokens=NEW_TOKENS)
        for prompt, answer in zip(asked.prompts, found, strict=True):
            _check_cached(answer, prompt, len(prompt) // asked.block_tokens * asked.block_tokens)
        different.append(sum(a.tokens != b.tokens for a, b in zip(found, computed, strict=True)))
        engine.forget()
    own, loaded = different
    what = "answers over blocks that FlexKV loaded, requests at once, that differ from computed"
    return Row(
        f"{what} ones, {asked.name}",
        loaded,
        "answers",
        None if own else goals.SAME_TOKENS,
        f"of {len(computed)}, {NEW_TOKENS} tokens each; over the engine's own: {own}",
    )


def differ(one: Completion, other: Completion) -> bool:
    """Whether two answers are not the same, to the last bit of their log probabilities."""
    return one.tokens != other.tokens or one.logprobs != other.logprobs


def _loaded(engine: Engine, asked: Questions, mode: str) -> list[Completion]:
    """The answers after the engine has forgotten everything."""
    engine.forget()
    parameters = {"flexkv.load_mode": mode}
    return [_ask(engine, asked, p, transfer_params=parameters) for p in asked.prompts]


def _ask(
    engine: Engine,
    asked: Questions,
    prompt: Sequence[int],
    cached: int | None = None,
    transfer_params: Mapping[str, Any] | None = None,
) -> Completion:
    """One answer; `cached` tokens of it, by default all whole blocks, must come from a cache."""
    answer = engine.generate(
        prompt, max_tokens=NEW_TOKENS, logprobs=True, transfer_params=transfer_params
    )
    wanted = len(prompt) // asked.block_tokens * asked.block_tokens if cached is None else cached
    _check_cached(answer, prompt, wanted)
    return answer


def _check_cached(answer: Completion, prompt: Sequence[int], wanted: int) -> None:
    if answer.cached_tokens != wanted:
        raise RuntimeError(
            f"{answer.cached_tokens} of {len(prompt)} tokens came from a cache, not {wanted}"
        )


def _noticed(engine: Engine, asked: Questions, place: int, own: Sequence[Completion]) -> bool:
    """Whether an answer changes with one byte of the arena, and is right again without."""
    arena = _arena_of(engine)
    _flip(arena, place)
    wrong = _loaded(engine, asked, ASYNC)
    _flip(arena, place)
    right = _loaded(engine, asked, ASYNC)
    return any(map(differ, wrong, own)) and not any(map(differ, right, own))


def _arena_of(engine: Engine) -> Path:
    return next(arena for pid in engine.pids() for arena in processes.memory_files(pid, _ARENA))


def _flip(arena: Path, place: int) -> None:
    with arena.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ _EXPONENT_BIT]))


def _places(before: bytes, after: bytes, model: ModelSpec) -> list[int]:
    """Bytes of stored numbers, spread over the arena: the upper one of those between 0.5 and 1,
    which a flip of its second bit makes as large as a number can be."""
    size = 4 if model.dtype == "float32" else 2
    old, new = (_numbers(memory, size) for memory in (before, after))
    stored = (old != new).any(axis=1)
    chosen = np.flatnonzero(stored & (new[:, -1] == 0x3F) & (new[:, -2] < 0x80))
    picked = chosen[np.linspace(0, len(chosen) - 1, DAMAGES + 2, dtype=np.int64)[1:-1]]
    return [int(number) * size + size - 1 for number in picked]


def _numbers(memory: bytes, size: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memory[: len(memory) // size * size], np.uint8).reshape(-1, size)
