# SPDX-License-Identifier: Apache-2.0
"""A real SGLang that computes on a CPU, with FlexKV behind `--enable-flexkv`.

A server without FlexKV gives the reference. One with FlexKV has a small arena and a disk. Each slot
of SGLang's KV cache is overwritten before a prompt is asked again, and the first test shows that
wrong bytes would change the tokens. The last tests kill the server and start another one, of two
ranks, on its disk.
"""

from __future__ import annotations

import contextlib
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flexkv.figures.definitions import METRICS, Kind
from integration.campaign.counts import Counts
from integration.campaign.faults import Kind as Fault
from integration.sglang.linker import PAGE_TOKENS
from integration.sglang.plain_server import PlainServer
from integration.tests.sglang_linked import (
    ABORTED,
    ANSWER,
    ARENA_PAGES,
    BATCH,
    CROWD,
    DISK,
    EAGER,
    FAILED,
    HOST,
    LATE,
    LONG_ANSWER,
    MANY,
    OWNED,
    PAGE_BYTES,
    PARTIAL,
    PATIENCE,
    SAID,
    SHARED,
    TURN,
    WARM,
    WRONG,
    Linked,
    ask_plainly,
    pages_of,
    plain_config,
)

KEPT = [*WARM, *BATCH, *MANY]


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory, model: Path, sglang: Path) -> Iterator[Linked]:
    folder = tmp_path_factory.mktemp("linker")
    with PlainServer(plain_config(model), folder / "plain.log") as server:
        plain = ask_plainly(server)
    linked = Linked(folder, model)
    # Its processes are begun as SGLang does it.
    linked.start(EAGER)
    try:
        linked.plain = plain
        yield linked
    finally:
        linked.close()


@pytest.mark.proof
def test_wrong_bytes_would_change_the_tokens(linked: Linked) -> None:
    assert linked.ask(WRONG).cached_tokens == 0
    linked.forget()
    assert linked.answer_to_wrong_bytes(WRONG, 100).cached_tokens == pages_of(len(WRONG))
    linked.forget()
    assert linked.ask(WRONG).cached_tokens == pages_of(len(WRONG))


def test_warm_after_a_flush(linked: Linked) -> None:
    for prompt in WARM:
        assert linked.ask(prompt).cached_tokens == 0
    linked.forget()
    for prompt in WARM:
        assert linked.ask(prompt).cached_tokens == pages_of(len(prompt))


def test_a_prefix_is_loaded_and_the_rest_computed(linked: Linked) -> None:
    linked.server.generate(SHARED, 1)
    linked.forget()
    found = []
    for prompt in PARTIAL:
        found.append(linked.ask(prompt).cached_tokens)
        linked.server.flush()
    assert found == [0, 0, 16, 192, 400]


def test_the_next_turn_finds_the_answer(linked: Linked) -> None:
    answer = linked.ask(TURN)
    linked.forget()
    turn = [*TURN, *answer.tokens, *SAID]
    # SGLang does not compute the last token of an answer.
    assert linked.ask(turn).cached_tokens == pages_of(len(TURN) + ANSWER)


def test_eight_slow_loads_of_one_batch(linked: Linked) -> None:
    for prompt in BATCH:
        linked.ask(prompt)
    linked.forget()
    linked.orders.give(Fault.LOAD_LATE, 12, PATIENCE)
    answers = linked.server.generate_all(BATCH, ANSWER)
    linked.orders.withdraw()
    assert any(hit.kind is Fault.LOAD_LATE for hit in linked.orders.hits())
    linked.check_batch(answers)


def test_a_load_that_fails_ends_only_its_request(linked: Linked) -> None:
    linked.ask(FAILED)
    linked.forget()
    linked.fail_load_beside(FAILED)
    linked.forget()
    linked.ask(FAILED)
    linked.check_all([FAILED])


def test_aborts_while_loads_run(linked: Linked) -> None:
    linked.ask(ABORTED)
    for number in range(3):
        linked.forget()
        linked.orders.give(Fault.LOAD_LATE, 4, PATIENCE)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(linked.server.generate, ABORTED, 200, rid=f"abort {number}")
            time.sleep(0.1 * number)
            linked.server.abort(f"abort {number}")
            with contextlib.suppress(urllib.error.HTTPError):  # if it had not begun
                asked.result()
        linked.orders.withdraw()
    linked.forget()
    assert linked.ask(ABORTED).cached_tokens == pages_of(len(ABORTED))


def test_more_than_the_arena_holds(linked: Linked) -> None:
    assert sum(map(len, MANY)) > ARENA_PAGES * PAGE_TOKENS
    for _ in range(2):
        for prompt in MANY:
            linked.ask(prompt)
        linked.forget()
    # What left the arena comes from disk.
    for prompt in MANY:
        assert linked.ask(prompt).cached_tokens == pages_of(len(prompt))


def test_requests_that_leave_the_running_batch_come_back(linked: Linked) -> None:
    known = CROWD[:-1]
    for prompt in known:
        linked.server.generate(prompt, 1)
    linked.forget()
    answers = linked.server.generate_all(CROWD, ANSWER)
    left = Counts(linked.server.metrics(), "sglang:").total("num_retracted_requests_total")
    assert left > 0
    for prompt, answer in zip(CROWD, answers, strict=True):
        linked.check(prompt, answer)
        assert answer.cached_tokens == (pages_of(len(prompt)) if prompt in known else 0)


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
def test_a_tenant_finds_what_it_has_stored_and_no_other_one_does(linked: Linked, name: str) -> None:
    tenant, other = {name: f"{name} A"}, {name: f"{name} B"}
    assert linked.ask(OWNED, **tenant).cached_tokens == 0
    linked.forget()
    assert linked.ask(OWNED, **other).cached_tokens == 0
    assert linked.ask(OWNED, **tenant).cached_tokens == pages_of(len(OWNED))


def test_what_belongs_to_a_tenant_is_not_everybodys(linked: Linked) -> None:
    assert linked.ask(OWNED).cached_tokens == 0


def test_metrics_have_all_names_and_labels(linked: Linked) -> None:
    found = {(each.name, frozenset(each.labels.items())) for each in linked.figures()}
    model = ("model_name", str(linked.server.config.model))
    suffix = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}
    for metric in METRICS:
        name = "sglang:flexkv_" + metric.name + suffix[metric.kind]
        for values in metric.combinations:
            labels = frozenset({model, *zip(metric.label_names, values, strict=True)})
            has_tier = not {"mooncake", "objects"} & set(values)
            assert ((name, labels) in found) == has_tier, (name, values)
    assert any(name == "sglang:flexkv_info" for name, _ in found)


def test_metrics_count_what_happens(linked: Linked) -> None:
    linked.ask(WRONG)
    linked.forget()
    linked.settle()
    names: list[tuple[str, dict[str, str]]] = [
        ("query_tokens_total", {"tier": "host"}),
        ("hit_tokens_total", {"tier": "host"}),
        ("hit_tokens_total", {"tier": "disk"}),
        ("copied_bytes_total", {"link": "device", "direction": "load"}),
    ]
    before = [linked.figure(name, **labels) for name, labels in names]
    linked.ask(WRONG)
    linked.settle()
    queries, host, disk, size = (
        linked.figure(name, **labels) - count
        for (name, labels), count in zip(names, before, strict=True)
    )
    assert queries == len(WRONG)
    assert host + disk == pages_of(len(WRONG))
    assert size == pages_of(len(WRONG)) // PAGE_TOKENS * PAGE_BYTES


def test_events_tell_what_each_tier_has(linked: Linked) -> None:
    linked.settle()
    told = linked.router.told
    deadline = time.monotonic() + PATIENCE
    # What tenants have has left host memory by now.
    while linked.figure("blocks", tier="host") != len(told[HOST]):
        assert time.monotonic() < deadline, len(told[HOST])
        time.sleep(0.1)
        linked.router.listen()
    assert len(told[HOST]) <= len(told[DISK]) < linked.figure("blocks", tier="disk")
    for prompt in KEPT:
        assert linked.router.knows(prompt)


# From here on another server runs.


def test_two_ranks_find_all_that_was_written_before_a_kill(linked: Linked) -> None:
    linked.settle()
    with ThreadPoolExecutor(len(LATE)) as pool:
        asked = [pool.submit(linked.server.generate, prompt, LONG_ANSWER) for prompt in LATE]
        linked.check(MANY[0], linked.server.generate(MANY[0], ANSWER))
        linked.server.kill()
        assert all(each.exception() is not None for each in asked), "it was idle"
    linked.start(tensor_parallel_size=2, forked=True)
    assert linked.ask(OWNED, extra_key="extra_key C").cached_tokens == 0
    tenant = {"extra_key": "extra_key A"}
    assert linked.ask(OWNED, **tenant).cached_tokens == pages_of(len(OWNED))
    for prompt in [*KEPT, OWNED]:
        assert linked.ask(prompt).cached_tokens == pages_of(len(prompt))
    for prompt in LATE:
        linked.ask(prompt)
    linked.settle()
    deadline = time.monotonic() + PATIENCE
    while unknown := [prompt for prompt in KEPT if not linked.router.knows(prompt)]:
        assert time.monotonic() < deadline, list(map(linked.router.unknown, unknown))
        time.sleep(0.1)
        linked.router.listen()


def test_two_ranks_load_what_they_have_stored(linked: Linked) -> None:
    linked.forget()
    for prompt in LATE:
        assert linked.ask(prompt).cached_tokens == pages_of(len(prompt))


def test_two_ranks_load_a_batch(linked: Linked) -> None:
    linked.forget()
    linked.orders.give(Fault.LOAD_LATE, 12, PATIENCE)
    answers = linked.server.generate_all(BATCH, ANSWER)
    linked.orders.withdraw()
    linked.check_batch(answers)


def test_a_load_that_fails_on_one_of_two_ranks_ends_its_request(linked: Linked) -> None:
    linked.ask(FAILED)
    linked.forget()
    linked.fail_load(FAILED)
    linked.ask(FAILED)
    linked.check_all([FAILED])


def test_a_clear_drops_what_two_ranks_have_stored(linked: Linked) -> None:
    prompt = KEPT[-1]
    linked.ask(prompt)
    linked.check_all([prompt])
    linked.clear()
    assert linked.ask(prompt).cached_tokens == 0
    linked.check_all([prompt])
