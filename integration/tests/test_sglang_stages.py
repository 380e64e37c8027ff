# SPDX-License-Identifier: Apache-2.0
"""A model whose layers are divided over two stages of a pipeline, on a real SGLang with FlexKV."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from integration.campaign.faults import Kind as Fault
from integration.sglang.plain_server import PlainServer
from integration.tests.sglang_linked import (
    ANSWER,
    BATCH,
    FAILED,
    MANY,
    PATIENCE,
    SHARED,
    WARM,
    Linked,
    Plain,
    ask_plainly,
    pages_of,
    plain_config,
    tokens,
)

STAGES = {"pp_size": 2}
CHUNK = 128
"""Tokens of a chunk of a prompt. SGLang computes a chunk while the later stage computes the one
before."""

IN_CHUNKS, FAILED_IN_CHUNKS = (
    SHARED + tokens(f"behind a shared prefix {number}", 900) for number in range(2)
)


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory, model: Path, sglang: Path) -> Iterator[Linked]:
    folder = tmp_path_factory.mktemp("stages")
    with PlainServer(plain_config(model), folder / "plain.log") as server:
        plain: Plain = ask_plainly(server)
        for prompt in (SHARED, IN_CHUNKS, FAILED_IN_CHUNKS):
            server.flush()
            plain.short[tuple(prompt)] = server.generate(prompt, ANSWER).tokens
    linked = Linked(folder, model, STAGES)
    linked.start(forked=True, chunked_prefill=CHUNK)
    try:
        linked.plain = plain
        yield linked
    finally:
        linked.close()


@pytest.mark.proof
def test_wrong_bytes_on_the_last_stage_would_change_the_tokens(linked: Linked) -> None:
    linked.ask(FAILED)
    linked.forget()
    assert linked.answer_to_wrong_bytes(FAILED, 1).cached_tokens == pages_of(len(FAILED))
    linked.server.flush()


def test_warm_after_a_flush(linked: Linked) -> None:
    for prompt in WARM:
        linked.ask(prompt)
    linked.check_all(WARM)


def test_a_loaded_prefix_is_kept_when_the_rest_takes_many_chunks(linked: Linked) -> None:
    linked.ask(SHARED)
    linked.forget()
    assert linked.ask(IN_CHUNKS).cached_tokens == pages_of(len(SHARED) + 1)
    # From SGLang's own cache, which got the loaded pages, too.
    assert linked.ask(IN_CHUNKS).cached_tokens == pages_of(len(IN_CHUNKS))
    linked.check_all([IN_CHUNKS])


def test_eight_slow_loads_at_once(linked: Linked) -> None:
    for prompt in BATCH:
        linked.ask(prompt)
    linked.forget()
    linked.orders.give(Fault.LOAD_LATE, 3, PATIENCE)
    with ThreadPoolExecutor(len(BATCH)) as pool:
        answers = list(pool.map(lambda prompt: linked.server.generate(prompt, ANSWER), BATCH))
    linked.orders.withdraw()
    linked.check_batch(answers)


def test_a_load_that_fails_on_the_last_stage_ends_only_its_request(linked: Linked) -> None:
    linked.ask(FAILED)
    linked.forget()
    linked.fail_load_beside(FAILED)
    linked.ask(FAILED)
    linked.check_all([FAILED])


def test_no_stage_keeps_pages_of_a_prompt_whose_load_failed(linked: Linked) -> None:
    """The first stage has computed further chunks when the last one's load has failed."""
    linked.ask(SHARED)
    linked.forget()
    linked.fail_load(FAILED_IN_CHUNKS)
    assert linked.ask(FAILED_IN_CHUNKS).cached_tokens == pages_of(len(SHARED) + 1)
    linked.check_all([FAILED_IN_CHUNKS])


def test_all_that_was_written_before_a_kill_is_found(linked: Linked) -> None:
    prompts = [*WARM, *MANY]
    for prompt in prompts:
        linked.ask(prompt)
    linked.restart()
    linked.check_all(prompts)


def test_a_clear_drops_what_two_stages_have_stored(linked: Linked) -> None:
    linked.ask(FAILED)
    linked.clear()
    assert linked.ask(FAILED).cached_tokens == 0
    linked.check_all([FAILED])
