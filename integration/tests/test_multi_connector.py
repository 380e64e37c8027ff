# SPDX-License-Identifier: Apache-2.0
"""FlexKV beside another connector, inside vLLM's MultiConnector.

The other one is vLLM's ExampleConnector, the only one of vLLM's that transfers KV on a CPU. It
keeps whole prompts as files, and loads them within a step; FlexKV loads between steps. Prompts are
no longer than a step computes, which is all that it can do.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from integration.harness import connector
from integration.harness.answers import Completion
from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.harness.host import EngineHost
from integration.tests.corpus import (
    BATCHED_TOKENS,
    CONCURRENT,
    DAMAGED,
    ENGINE_BLOCK,
    FLEXKV_BLOCK,
    NEW_TOKENS,
    PREEMPTED,
    PREEMPTED_NEW_TOKENS,
    SALTED,
    WARM,
    Tokens,
    tokens,
)
from integration.tests.disks import settle
from integration.tests.reference import Reference
from integration.tests.steps import ask_each, ask_together, external_hits, whole_blocks
from integration.tests.test_observed import DISK, HOST, Router, blocks_of

PROMPTS = (WARM[1], WARM[3], SALTED, DAMAGED)
HITS = "vllm:flexkv_hit_tokens"
STORED = "vllm:flexkv_stored_blocks"

Settings = Callable[..., dict[str, Any]]
Config = Callable[..., EngineConfig]


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Where the other connector keeps its files."""
    return tmp_path / "shared"


def flexkv_tokens(prompts: Iterable[Tokens]) -> int:
    return sum(map(whole_blocks, map(len, prompts)))


def others_tokens(prompts: Iterable[Tokens]) -> list[int]:
    """Of each prompt, what the other connector loads: it leaves the last two tokens to compute."""
    return [whole_blocks(len(prompt) - 2, ENGINE_BLOCK) for prompt in prompts]


def cached(answers: Sequence[Completion]) -> list[int]:
    return [answer.cached_tokens or 0 for answer in answers]


def drop(storage: Path) -> None:
    """The other connector forgets everything."""
    shutil.rmtree(storage)
    storage.mkdir()


@pytest.fixture
def first_storage(work_dir: Path) -> Path:
    """Where the connector behind FlexKV keeps its files."""
    return work_dir / "behind-flexkv"


@pytest.fixture
def flexkv_first(
    host: EngineHost,
    reference: Reference,
    flexkv: Settings,
    engine_config: Config,
    first_storage: Path,
) -> Engine:
    """With as few blocks as in `test_equality_preempted`."""
    chosen = connector.multi(connector.plugin(**flexkv()), connector.example(first_storage))
    return host.get(engine_config(chosen, num_blocks=45, max_model_len=1024))


def test_flexkv_first(flexkv_first: Engine, reference: Reference, first_storage: Path) -> None:
    engine = flexkv_first
    begun, asked_before = engine.counter(HITS), external_hits(engine)
    reference.check_all(PROMPTS, ask_each(engine, PROMPTS), what="cold")
    assert any(first_storage.iterdir()), "the other one stores, too"
    engine.forget()
    warm = ask_each(engine, PROMPTS)
    reference.check_all(PROMPTS, warm, what="from FlexKV")
    assert cached(warm) == [whole_blocks(len(prompt)) for prompt in PROMPTS]
    hits = engine.counter(HITS)
    assert hits - begun == external_hits(engine) - asked_before == flexkv_tokens(PROMPTS)

    # Now FlexKV has nothing, and it is the other one's turn.
    engine.reset_prefix_cache(reset_connector=True)
    engine.rpc("keeps_weights_scrub")
    stored = engine.counter(STORED)
    others = ask_each(engine, PROMPTS)
    reference.check_all(PROMPTS, others, what="from the other one")
    assert cached(others) == others_tokens(PROMPTS)
    assert engine.counter(HITS) == hits, "nothing more"

    # What the other one loaded FlexKV has stored: it can be had without that.
    drop(first_storage)
    engine.forget()
    warm = ask_each(engine, PROMPTS)
    reference.check_all(PROMPTS, warm, what="what the other one had loaded")
    assert cached(warm) == [whole_blocks(len(prompt)) for prompt in PROMPTS]
    answered = [whole_blocks(len(prompt) + NEW_TOKENS - 1) for prompt in PROMPTS]
    assert engine.counter(STORED) - stored == sum(answered) // FLEXKV_BLOCK


def test_preemptions_get_through(flexkv_first: Engine, reference: Reference) -> None:
    """Stores of blocks that vLLM takes away are waited for: see `test_equality_preempted`."""
    engine = flexkv_first
    before = engine.counter(HITS)
    answers = ask_together(engine, PREEMPTED, PREEMPTED_NEW_TOKENS, all_queued=True)
    reference.check_all(PREEMPTED, answers, PREEMPTED_NEW_TOKENS, what="preempted")
    assert engine.counter("vllm:num_preemptions") > 0
    assert engine.counter(HITS) > before, "what was preempted came back from FlexKV"
    assert engine.counter("vllm:flexkv_failures") == 0


@pytest.fixture
def router() -> Iterator[Router]:
    with tempfile.TemporaryDirectory(prefix="flexkv-test-") as folder:
        made = Router(f"ipc://{folder}/events")
        yield made
        made.close()


def test_flexkv_second(
    host: EngineHost,
    reference: Reference,
    *,
    flexkv: Settings,
    engine_config: Config,
    storage: Path,
    router: Router,
) -> None:
    chosen = connector.multi(connector.example(storage), connector.plugin(**flexkv()))
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": router.endpoint}
    engine = host.start(engine_config(chosen, extra_args={"kv_events_config": events}))
    router.await_server()
    cold = ask_each(engine, PROMPTS)
    reference.check_all(PROMPTS, cold, what="cold")
    # Events and metrics get through.
    kept = [
        blocks_of(prompt + tuple(answer.tokens[:-1]))
        for prompt, answer in zip(PROMPTS, cold, strict=True)
    ]
    hear_all(engine, router)
    assert set(router.told[HOST].values()) == set().union(*kept)
    assert router.told[DISK] == {}
    assert engine.counter(STORED, tier="host") == sum(map(len, kept))

    engine.forget()
    others = ask_each(engine, PROMPTS)
    reference.check_all(PROMPTS, others, what="from the first")
    assert cached(others) == others_tokens(PROMPTS)
    assert engine.counter(HITS) == 0, "both have it, and it was not FlexKV's turn"

    # Prompts that share a part with others: the first one knows whole prompts only.
    parts = [prompt for prompt in CONCURRENT if len(prompt) <= BATCHED_TOKENS]
    reference.check_all(parts, ask_each(engine, parts), what="parts")
    drop(storage)
    engine.forget()
    known = [*PROMPTS, *parts]
    before = external_hits(engine)
    hits = engine.counter(HITS)
    # All are looked up before any is computed: of the shortest, which begin alike, the first that
    # is computed is a hit of the other connector for the next.
    warm = ask_together(engine, known, all_queued=True)
    reference.check_all(known, warm, what="from FlexKV")
    assert engine.counter(HITS, tier="host") - hits == external_hits(engine) - before > 0


def hear_all(engine: Engine, router: Router) -> None:
    """Have a router hear all that has happened in an engine so far."""
    settle(engine)
    mark = tokens("mark", ENGINE_BLOCK + 1)
    engine.generate(mark, max_tokens=3)
    router.listen(mark[:ENGINE_BLOCK])


def test_beside_a_transfer_between_engines(
    host: EngineHost, reference: Reference, flexkv: Settings, engine_config: Config, storage: Path
) -> None:
    """One engine prefills for another. What the second got from the first, it has in FlexKV from
    then on, and needs neither the first nor the transfer for it any more."""
    prefill = connector.multi(
        connector.plugin(**flexkv()), connector.example(storage, "kv_producer")
    )
    engine = host.start(engine_config(prefill))
    for prompt in PROMPTS:
        engine.generate(prompt, max_tokens=1)

    decode = connector.multi(
        connector.plugin(**flexkv()), connector.example(storage, "kv_consumer")
    )
    engine = host.start(engine_config(decode))
    first = ask_each(engine, PROMPTS)
    reference.check_all(PROMPTS, first, what="from the other engine")
    assert cached(first) == others_tokens(PROMPTS)
    assert engine.counter(HITS) == 0
    drop(storage)
    engine.forget()
    second = ask_each(engine, PROMPTS)
    reference.check_all(PROMPTS, second, what="from FlexKV")
    assert cached(second) == [whole_blocks(len(prompt)) for prompt in PROMPTS]
    assert engine.counter(HITS) == flexkv_tokens(PROMPTS)
