# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode server of a real SGLang (PD disaggregation). SGLang sends pages from one
to the other; FlexKV keeps those of both, in a folder that they share."""

from __future__ import annotations

import dataclasses
import itertools
import urllib.error
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'flexkv[objects]'")
pytest.importorskip("mooncake", reason="needs pip install 'flexkv[mooncake]'")

from integration.campaign.counts import Counts
from integration.campaign.faults import Kind as Fault
from integration.campaign.faults import OrderBook
from integration.harness.checkpoint import TINY, ModelSpec
from integration.harness.families import write_family
from integration.harness.ports import hold_port
from integration.sglang.linker import PAGE_TOKENS, linker_config, orders_in
from integration.sglang.plain_server import PlainServer
from integration.sglang.server import Answer, SglangServer
from integration.tests.sglang_linked import PATIENCE, plain_config, settle, tokens

ANSWER = 20
WRONG, FIRST, BESIDE = tokens("wrong", 300), tokens("first", 200), tokens("beside", 700)
SAID = tokens("said", 60)
ROLES = ("prefill", "decode")


@dataclass
class Model:
    """A model.

    Attributes:
        path: of its checkpoint.
        spec: its shape.
        step: a hit of a prompt ends at a multiple of so many tokens.
        flags: of its servers.
    """

    path: Path
    spec: ModelSpec = TINY
    step: int = PAGE_TOKENS
    flags: Mapping[str, Any] = field(default_factory=dict)

    def hit(self, tokens: int) -> int:
        """How many tokens of a prompt of so many come back."""
        return (tokens - 1) // self.step * self.step


@dataclass
class Pair:
    """A prefill and a decode server.

    Attributes:
        model: of both.
        prefill, decode: the servers.
        port: of the prefill server, where decode servers meet it.
        orders: what goes wrong in the prefill server.
        plain: a server without FlexKV that does both.
    """

    model: Model
    prefill: SglangServer
    decode: SglangServer
    port: int
    orders: OrderBook
    plain: PlainServer
    _rooms: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def ask(self, prompt: list[int]) -> tuple[Answer, Answer]:
        """What both servers answer; the whole answer is the second one's.

        Raises:
            urllib.error.HTTPError: the prefill server failed. The request of the decode server,
                which would wait for the pages, is aborted then, as routers do.
        """
        room = next(self._rooms)
        meeting: dict[str, Any] = {
            "bootstrap_host": ["127.0.0.1"],
            "bootstrap_port": [self.port],
            "bootstrap_room": [room],
            "rid": [f"room {room}"],
        }
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(self.prefill.generate_all, [prompt], ANSWER, **meeting)
            rest = pool.submit(self.decode.generate_all, [prompt], ANSWER, **meeting)
            try:
                answers = first.result()[0], rest.result()[0]
            except urllib.error.HTTPError:
                self.decode.abort(f"room {room}")
                raise
        self.settle()
        return answers

    def check(self, prompt: list[int]) -> int:
        """Ask, and compare with what the other server says. Returns how many tokens the prefill
        server had."""
        first, rest = self.ask(prompt)
        assert rest.tokens == self.plain_answer(prompt)
        assert first.tokens == rest.tokens[:1]
        return first.cached_tokens

    def plain_answer(self, prompt: list[int]) -> list[int]:
        self.plain.flush()
        return self.plain.generate(prompt, ANSWER).tokens

    def forget(self) -> None:
        """Both servers have nothing of any prompt, and other bytes where it was."""
        for server in (self.prefill, self.decode):
            server.flush()
        for part in range(3):
            self.ask(tokens(f"overwrite {part}", 1900))
        for server in (self.prefill, self.decode):
            server.flush()

    def settle(self) -> None:
        """Wait until all that was stored is in the shared folder."""
        for server in (self.prefill, self.decode):
            settle(server)

    def figure(self, role: str, name: str, **labels: str) -> int:
        server = self.prefill if role == "prefill" else self.decode
        return Counts(server.metrics(), "sglang:").total(f"flexkv_{name}", **labels)


@pytest.fixture(scope="module", params=["full attention", "windows", "states"])
def served(request: pytest.FixtureRequest, model: Path, work_dir: Path, sglang: Path) -> Model:
    if request.param == "windows":
        path = write_family("mellum", work_dir, sglang)
        return Model(path, dataclasses.replace(TINY, layers=9))
    if request.param == "states":
        path, few = write_family("qwen3_5", work_dir, sglang), {"max_mamba_cache_size": 64}
        return Model(path, dataclasses.replace(TINY, layers=4), 64, few)
    return Model(model)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, served: Model) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    held = hold_port()
    port: int = held.getsockname()[1]
    (folder / "shared").mkdir(mode=0o700)
    orders = orders_in(folder)
    servers: dict[str, SglangServer] = {}

    def start(role: str) -> None:
        settings = {
            "FLEXKV_CPU_CACHE_GB": "0.05",
            "FLEXKV_RUNTIME_DIR": str(folder / role),
            "FLEXKV_ALWAYS_LOAD": "1",
            "FLEXKV_OBJECTS_URL": (folder / "shared").as_uri(),
            "FLEXKV_OBJECTS_QUESTION_SECONDS": "5",
            "FLEXKV_OBJECTS_TIMEOUT_SECONDS": str(PATIENCE),
            "MC_FORCE_TCP": "1",  # of Mooncake, which moves the pages
        }
        flags: dict[str, Any] = {
            **served.flags,
            "disaggregation_mode": role,
            "disaggregation_transfer_backend": "mooncake",
            "disaggregation_bootstrap_port": port,
        }
        if role == "decode":
            flags["disaggregation_decode_enable_radix_cache"] = True
        else:
            # With it, SGLang makes events of CUDA before it sends what is cached.
            flags["disable_overlap_schedule"] = True
        steered = folder if role == "prefill" else None
        config = linker_config(
            served.path, served.spec, settings, steered, flags=flags, forked=True
        )
        servers[role] = SglangServer(config, folder / f"{role}.log")

    config = dataclasses.replace(plain_config(served.path), flags=served.flags)
    with PlainServer(config, folder / "plain.log") as plain:
        try:
            for role in ROLES:
                start(role)
            yield Pair(served, servers["prefill"], servers["decode"], port, orders, plain)
        finally:
            for server in servers.values():
                server.close()
            held.close()


@pytest.mark.proof
def test_wrong_bytes_would_change_the_tokens(pair: Pair) -> None:
    assert pair.check(WRONG) == 0
    pair.forget()
    pair.orders.give(Fault.LOAD_WRONG, 100, PATIENCE)
    first, rest = pair.ask(WRONG)
    pair.orders.withdraw()
    assert first.cached_tokens == pair.model.hit(len(WRONG))
    assert rest.tokens != pair.plain_answer(WRONG)
    pair.forget()
    assert pair.check(WRONG) == pair.model.hit(len(WRONG))


def test_the_prefill_server_loads_what_it_has_stored(pair: Pair) -> None:
    assert pair.check(FIRST) == 0
    pair.forget()
    before = pair.figure("prefill", "hit_tokens_total")
    assert pair.check(FIRST) == pair.model.hit(len(FIRST))
    assert pair.figure("prefill", "hit_tokens_total") - before == pair.model.hit(len(FIRST))


def test_the_prefill_server_loads_answers_that_the_decode_server_has_stored(pair: Pair) -> None:
    turn = [*FIRST, *pair.ask(FIRST)[1].tokens, *SAID]
    pair.forget()
    before = pair.figure("prefill", "hit_tokens_total", tier="objects")
    # SGLang does not compute the last token of an answer.
    length = pair.model.hit(len(FIRST) + ANSWER)
    assert pair.check(turn) == length
    # The answer is too short for a state of its own.
    comes = length > pair.model.hit(len(FIRST))
    assert (pair.figure("prefill", "hit_tokens_total", tier="objects") > before) == comes


def test_a_load_that_fails_ends_its_request_and_no_other_one(pair: Pair) -> None:
    pair.check(BESIDE)
    pair.forget()
    pair.orders.give(Fault.LOAD_FAILED, 1, PATIENCE)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        pair.ask(BESIDE)
    pair.orders.withdraw()
    assert pair.check(FIRST) > 0
    pair.check(BESIDE)
