# SPDX-License-Identifier: Apache-2.0
"""Whether a real vLLM gives the same tokens over blocks that FlexKV loaded, on this device.

A prompt is asked twice, and then once more after the engine has forgotten it: the second time the
engine takes its beginning from its own cache, the third time from FlexKV. Both times it computes
the same rest over what must be the same bytes, so even in bfloat16 the answers are the same, to the
last bit. The weights are large enough for each cached row to count. That the comparison notices one
wrong byte is tried last, on bytes that are changed in host memory.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from integration.bench.rows import Goal, Row
from integration.gpu import goals
from integration.gpu.results import Log
from integration.harness import connector, processes
from integration.harness.answers import Completion
from integration.harness.checkpoint import ModelSpec, write_checkpoint
from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.harness.prompts import random_tokens

MODES = ("async", "layerwise")
NEW_TOKENS = 32
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


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked, and of which engine.

    Attributes:
        model: its checkpoint is made.
        block_tokens: of FlexKV, a multiple of the engine's.
        blocks: of each prompt, which is a few tokens longer.
        settings: further ones of FlexKV.
        engine: further fields of ``EngineConfig``.
    """

    model: ModelSpec
    block_tokens: int
    blocks: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def prompts(self) -> list[list[int]]:
        """Prompts of random tokens, as long as the blocks and 17 tokens more."""
        return [
            random_tokens(f"tokens {blocks}", blocks * self.block_tokens + 17, self.model.vocab)
            for blocks in self.blocks
        ]


ON_GPU = Questions(SMALL, 256, (1, 2, 7, 16, 40), {"cpu_cache_gb": 1.0})


def token_rows(log: Log) -> Iterator[Row]:
    """All rows, or none and the reason where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        log.note("vLLM is not installed: not measured")
        return
    with tempfile.TemporaryDirectory(prefix="flexkv-tokens-") as folder:
        yield from compare(ON_GPU, Path(folder), log)


def compare(asked: Questions, folder: Path, log: Log) -> Iterator[Row]:
    """Start an engine and ask.

    Raises:
        RuntimeError: an answer was to use a cache and did not, or the other way round.
    """
    settings = {"load_mode": "auto", "block_tokens": asked.block_tokens, **asked.settings}
    config = EngineConfig(
        model=write_checkpoint(asked.model, folder),
        dtype=asked.model.dtype,
        connector=connector.plugin(**settings),
        max_model_len=max(map(len, asked.prompts)) + NEW_TOKENS + 1,
        max_num_batched_tokens=8192,
        probe=True,
        async_scheduling=False,  # for layer-wise loads
        **asked.engine,
    )
    with Engine(config, folder / "tokens.log") as engine:
        log.say("the engine's own cache")
        before = _arena_of(engine).read_bytes()
        computed = [_ask(engine, asked, prompt, 0) for prompt in asked.prompts]
        own = [_ask(engine, asked, prompt) for prompt in asked.prompts]
        for mode in MODES:
            log.say(f"loads, {mode}")
            loaded = _loaded(engine, asked, mode)
            what = f"answers over blocks that FlexKV loaded, {mode}, that differ from "
            detail = f"of {len(loaded)}, {NEW_TOKENS} tokens each"
            different = sum(map(differ, loaded, own))
            yield Row(
                f"{what}those over the engine's own",
                different,
                "answers",
                goals.SAME_TOKENS,
                detail,
            )
            rounded = sum(a.tokens != b.tokens for a, b in zip(loaded, computed, strict=True))
            detail += "; rounding differs, since more is computed at once"
            yield Row(f"{what}computed ones", rounded, "answers", None, detail)
        log.say("wrong bytes")
        places = _places(before, _arena_of(engine).read_bytes(), asked.model)
        unseen = [place for place in places if not _noticed(engine, asked, place, own)]
    yield Row(
        "wrong bytes in host memory that change no answer",
        len(unseen),
        "bytes",
        Goal("<=", 0),
        f"of {len(places)}, one after the other",
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
    if answer.cached_tokens != wanted:
        raise RuntimeError(
            f"{answer.cached_tokens} of {len(prompt)} tokens came from a cache, not {wanted}"
        )
    return answer


def _noticed(engine: Engine, asked: Questions, place: int, own: Sequence[Completion]) -> bool:
    """Whether an answer changes with one byte of the arena, and is right again without."""
    arena = _arena_of(engine)
    _flip(arena, place)
    wrong = _loaded(engine, asked, MODES[0])
    _flip(arena, place)
    right = _loaded(engine, asked, MODES[0])
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
