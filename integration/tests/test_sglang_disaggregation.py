# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode server of a real SGLang (PD disaggregation). SGLang sends pages from one
to the other; FlexKV keeps those of both, in a folder that they share."""

from __future__ import annotations

import dataclasses
import itertools
import time
import urllib.error
from collections.abc import Iterator
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
from integration.sglang.linker import linker_config, orders_in
from integration.sglang.server import Answer, SglangServer
from integration.tests.sglang_linked import PATIENCE, pages_of, plain_config, tokens

ANSWER = 20
WRONG, FIRST, BESIDE = tokens("wrong", 300), tokens("first", 200), tokens("beside", 700)
SAID = tokens("said", 60)
ROLES = ("prefill", "decode")


@dataclass
class Pair:
    """A prefill and a decode server.

    Attributes:
        prefill, decode: the servers.
        port: of the prefill server, where decode servers meet it.
        orders: what goes wrong in the prefill server.
        plain: a server without FlexKV that does both.
    """

    prefill: SglangServer
    decode: SglangServer
    port: int
    orders: OrderBook
    plain: SglangServer
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
        deadline = time.monotonic() + PATIENCE
        for server in (self.prefill, self.decode):
            server.await_steps()
            while Counts(server.metrics(), "sglang:").total("flexkv_queue_length"):
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def figure(self, role: str, name: str, **labels: str) -> int:
        server = self.prefill if role == "prefill" else self.decode
        return Counts(server.metrics(), "sglang:").total(f"flexkv_{name}", **labels)


@pytest.fixture(scope="module", params=["full attention", "windows"])
def served(
    request: pytest.FixtureRequest, model: Path, work_dir: Path, sglang: Path
) -> tuple[Path, ModelSpec]:
    """A model, and its shape."""
    if request.param == "windows":
        return write_family("mellum", work_dir, sglang), dataclasses.replace(TINY, layers=9)
    return model, TINY


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, served: tuple[Path, ModelSpec]
) -> Iterator[Pair]:
    model, spec = served
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
        config = linker_config(model, spec, settings, steered, flags=flags, forked=True)
        servers[role] = SglangServer(config, folder / f"{role}.log")

    with SglangServer(plain_config(model), folder / "plain.log") as plain:
        try:
            for role in ROLES:
                start(role)
            yield Pair(servers["prefill"], servers["decode"], port, orders, plain)
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
    assert first.cached_tokens == pages_of(len(WRONG))
    assert rest.tokens != pair.plain_answer(WRONG)
    pair.forget()
    assert pair.check(WRONG) == pages_of(len(WRONG))


def test_the_prefill_server_loads_what_it_has_stored(pair: Pair) -> None:
    assert pair.check(FIRST) == 0
    pair.forget()
    before = pair.figure("prefill", "hit_tokens_total")
    assert pair.check(FIRST) == pages_of(len(FIRST))
    assert pair.figure("prefill", "hit_tokens_total") - before == pages_of(len(FIRST))


def test_the_prefill_server_loads_answers_that_the_decode_server_has_stored(pair: Pair) -> None:
    turn = [*FIRST, *pair.ask(FIRST)[1].tokens, *SAID]
    pair.forget()
    before = pair.figure("prefill", "hit_tokens_total", tier="objects")
    # SGLang does not compute the last token of an answer.
    assert pair.check(turn) == pages_of(len(FIRST) + ANSWER)
    assert pair.figure("prefill", "hit_tokens_total", tier="objects") > before


def test_a_load_that_fails_ends_its_request_and_no_other_one(pair: Pair) -> None:
    pair.check(BESIDE)
    pair.forget()
    pair.orders.give(Fault.LOAD_FAILED, 1, PATIENCE)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        pair.ask(BESIDE)
    pair.orders.withdraw()
    assert pair.check(FIRST) > 0
    pair.check(BESIDE)
