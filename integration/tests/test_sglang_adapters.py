# SPDX-License-Identifier: Apache-2.0
"""LoRA on a real SGLang: the same prompt has other KV with each adapter, and shares nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.harness.adapter import write_adapter
from integration.harness.checkpoint import TINY
from integration.sglang.plain_server import PlainServer
from integration.sglang.server import ServerConfig, SglangClient
from integration.tests.sglang_linked import ANSWER, Linked, pages_of, tokens

FIRST, SECOND, RETRAINED = "first", "second", "retrained"
SERVED = (None, FIRST, SECOND)
PROMPT = tokens("adapters", 333)
HIT = pages_of(len(PROMPT))


class Adapters:
    """Adapters under one folder, and SGLang's answers with each without FlexKV.

    Attributes:
        folder: of the adapters.
        flags: of a server that has the first two.
        plain: the answers by the adapter's name; None stands for none.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder / "adapters"
        for number, name in enumerate((FIRST, SECOND, RETRAINED), 1):
            write_adapter(TINY, self.folder, name, number)
        self.flags = {
            "enable_lora": True,
            "lora_backend": "torch_native",
            "lora_paths": [f"{name}={self.folder / name}" for name in (FIRST, SECOND)],
        }
        config = ServerConfig(model, TINY, flags=self.flags, forked=True)
        self.plain: dict[str | None, list[int]] = {}
        with PlainServer(config, folder / "plain.log") as server:
            change(server, "load", RETRAINED, self.folder / RETRAINED)
            for chosen in (*SERVED, RETRAINED):
                server.flush()
                self.plain[chosen] = ask(server, chosen)[0]
        given = set(map(tuple, self.plain.values()))
        assert len(given) == len(self.plain), "they do not differ: this shows nothing"

    def retrain(self) -> None:
        """The folder of the first one has other weights from now on."""
        shutil.copytree(self.folder / RETRAINED, self.folder / FIRST, dirs_exist_ok=True)

    def answers(self, first: str) -> dict[str | None, list[int]]:
        """What a server has to answer whose first adapter has the weights of the one named."""
        return {**{name: self.plain[name] for name in SERVED}, FIRST: self.plain[first]}


def change(server: SglangClient, verb: str, name: str, path: Path | None = None) -> None:
    """Load or unload an adapter of a running server."""
    body = {"lora_name": name} | ({} if path is None else {"lora_path": str(path)})
    assert json.loads(server.ask(f"/{verb}_lora_adapter", body))["success"]


def ask(server: SglangClient, adapter: str | None) -> tuple[list[int], int]:
    """The answer to the one prompt, and how much of that was cached."""
    chosen = {} if adapter is None else {"lora_path": adapter}
    answer = server.generate(PROMPT, ANSWER, **chosen)
    return answer.tokens, answer.cached_tokens


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, model: Path, sglang: Path) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"), model)


@pytest.fixture(scope="module")
def linked(
    tmp_path_factory: pytest.TempPathFactory, model: Path, adapters: Adapters
) -> Iterator[Linked]:
    linked = Linked(tmp_path_factory.mktemp("linked"), model, adapters.flags)
    linked.start(forked=True)
    try:
        yield linked
    finally:
        linked.close()


def check(linked: Linked, wanted: dict[str | None, list[int]], cached: int) -> None:
    for name, answer in wanted.items():
        assert ask(linked.server, name) == (answer, cached), name
        linked.forget()


def test_adapters_share_nothing(linked: Linked, adapters: Adapters) -> None:
    wanted = adapters.answers(FIRST)
    check(linked, wanted, 0)
    check(linked, wanted, HIT)


def test_adapters_outlive_the_server_by_their_weights(linked: Linked, adapters: Adapters) -> None:
    wanted = adapters.answers(FIRST)
    for name in wanted:
        ask(linked.server, name)
    linked.restart()
    assert {name: ask(linked.server, name) for name in wanted} == {
        name: (answer, HIT) for name, answer in wanted.items()
    }
    assert linked.figure("hit_tokens_total", tier="disk") == len(SERVED) * HIT

    # The same name and the same folder, loaded with other weights while the server runs.
    adapters.retrain()
    change(linked.server, "unload", FIRST)
    change(linked.server, "load", FIRST, adapters.folder / FIRST)
    retrained = adapters.answers(RETRAINED)
    check(linked, {FIRST: retrained[FIRST]}, 0)
    check(linked, retrained, HIT)

    # And named on the command line.
    linked.restart()
    check(linked, {FIRST: retrained[FIRST]}, 0)
    check(linked, {FIRST: retrained[FIRST]}, HIT)
