# SPDX-License-Identifier: Apache-2.0
"""What several tests do with an engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from integration.harness import processes
from integration.harness.answers import Completion, EngineStartError
from integration.harness.config import EngineConfig
from integration.harness.engine import START_TIMEOUT, Engine
from integration.harness.vllm_forks import fork_server
from integration.tests import corpus, started_core
from integration.tests.corpus import Tokens

_FLEXKV_ERROR = re.compile(r"^.*flexkv\.types\.errors\.\w+: (.*)$", re.MULTILINE)


def ask(
    engine: Engine,
    prompt: Sequence[int],
    max_tokens: int = corpus.NEW_TOKENS,
    cache_salt: str | None = None,
) -> Completion:
    """One prompt, with log probabilities, so that it can be compared with the reference."""
    return engine.generate(prompt, max_tokens=max_tokens, cache_salt=cache_salt, logprobs=True)


def ask_each(engine: Engine, prompts: Iterable[Sequence[int]]) -> list[Completion]:
    """One prompt after the other."""
    return [ask(engine, prompt) for prompt in prompts]


def ask_together(
    engine: Engine,
    prompts: Iterable[Sequence[int]],
    max_tokens: int = corpus.NEW_TOKENS,
    *,
    all_queued: bool = False,
) -> list[Completion]:
    """All prompts at once. What must happen because they run together needs ``all_queued``: on a
    slow machine the first may have ended before the last is there."""
    return engine.generate_many(
        prompts, max_tokens=max_tokens, logprobs=True, all_queued=all_queued
    )


def have_told(engine: Engine) -> None:
    """Have an engine that was idle tell in its metrics what is and what has happened: FlexKV does
    so when the last request ends."""
    engine.generate(corpus.SHORT, max_tokens=3)


def whole_blocks(tokens: int, block: int = corpus.FLEXKV_BLOCK) -> int:
    """Tokens of the whole blocks among ``tokens``."""
    return tokens // block * block


def external_hits(engine: Engine) -> int:
    """Prompt tokens that vLLM has taken from its connector so far."""
    return int(engine.counter("vllm:external_prefix_cache_hits"))


def flexkv_counters(engine: Engine) -> dict[str, int]:
    """What FlexKV says that it did, in its last line; the engine must have ended."""
    lines = re.findall(r"FlexKV ends: (.*)", engine.log())
    assert len(lines) == 1, lines
    return {name: int(count) for name, count in re.findall(r"(\w+) (\d+)", lines[0])}


def refusal(start: Callable[[], Engine]) -> str:
    """What FlexKV says when this start fails: one line, however often vLLM repeats it."""
    with pytest.raises(EngineStartError) as caught:
        start()
    assert caught.value.killed == [], "a half-started engine was left"
    return _error_in(caught.value.log)


def forked_refusal(config: EngineConfig, log_path: Path) -> str:
    """As `refusal`, of vLLM's engine core in one process, which is forked."""
    said = core_log(config, log_path)
    assert started_core.STARTED not in said
    return _error_in(said)


def core_log(config: EngineConfig, log_path: Path) -> str:
    """What vLLM's engine core says at its start, in one process, which is forked and ends; see
    `started_core`."""
    with log_path.open("wb") as log:
        process = fork_server().run(
            started_core.__name__,
            config.environment(),
            log.fileno(),
            [json.dumps(config.engine_args())],
        )
    left = processes.wait_until_gone(process.pid, START_TIMEOUT)
    processes.kill_group(process.pid)
    assert left == [], "a half-started engine was left"
    return log_path.read_text(errors="replace")


def _error_in(log: str) -> str:
    said = set(_FLEXKV_ERROR.findall(log))
    assert len(said) == 1, said or log
    return str(said.pop())


def blocks_of(engine: Engine, prompt: Tokens) -> list[int]:
    """Compute (or restore) a prompt; the engine blocks that it fills, in order.

    The request has ended then. Its blocks keep what they hold, in vLLM's prefix cache.
    """
    engine.rpc("keeps_weights_record")
    generation = engine.submit(prompt, max_tokens=1)
    generation.result()
    blocks: list[int] = engine.rpc("keeps_weights_blocks", generation.request_id)[0]
    return blocks[: len(prompt) // corpus.ENGINE_BLOCK]
