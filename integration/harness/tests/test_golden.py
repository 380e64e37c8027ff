# SPDX-License-Identifier: Apache-2.0
"""Stored answers: their keys, and what is asked of the real engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from integration.harness import connector, plain_engine
from integration.harness.adapter import Adapter
from integration.harness.answers import Completion
from integration.harness.checkpoint import TINY
from integration.harness.config import EngineConfig
from integration.harness.golden import VARIABLE, Ledger, Mode, StandIn, digest_of_files, portable
from integration.harness.plain_engine import PlainEngine
from integration.sglang import plain_server
from integration.sglang.plain_server import PlainServer
from integration.sglang.server import ServerConfig

BOOK = "engine-1"


class RealEngine:
    """Answers with the prompt, and counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def answer(self, prompt: str) -> str:
        self.asked.append(prompt)
        return f"answer to {prompt}"


class Asker(StandIn):
    """A stand-in for a `RealEngine`."""

    def __init__(self, ledger: Ledger, engine: dict[str, str] | None, **options: bool) -> None:
        super().__init__(BOOK, engine, ledger=ledger, **options)
        self.real = RealEngine()

    def ask(self, prompt: str, lasting: bool = False) -> str:
        answer: str = self.call(prompt, lambda: self.real.answer(prompt), lasting=lasting)
        return answer

    def flush(self) -> None:
        self.forget(lambda: self.real.asked.append("flush"))


ENGINE = {"model": "tiny"}


def store(folder: Path, ask: Callable[[Asker], object], engine: dict[str, str] = ENGINE) -> None:
    """Store what `ask` asks."""
    ledger = Ledger(folder, Mode.WRITE)
    ask(Asker(ledger, engine))
    ledger.write(ledger.asked, complete=True)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """In which the answers to "a" and, after it, "b" are stored."""
    store(tmp_path, lambda asker: [asker.ask("a"), asker.ask("b")])
    return Ledger(tmp_path, Mode.STORED)


# Calls --------------------------------------------------------------------------------------------


def test_stored_answers_need_no_engine(ledger: Ledger) -> None:
    asker = Asker(ledger, ENGINE)
    assert [asker.ask("a"), asker.ask("b")] == ["answer to a", "answer to b"]
    assert asker.real.asked == []
    assert ledger.used


def test_the_engine_repeats_earlier_calls_before_one_that_is_not_stored(ledger: Ledger) -> None:
    asker = Asker(ledger, ENGINE)
    assert [asker.ask(prompt) for prompt in "acb"] == [f"answer to {prompt}" for prompt in "acb"]
    assert asker.real.asked == ["a", "c", "b"]
    assert len(ledger.missing) == 2


def test_an_answer_depends_on_the_calls_before(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, Mode.WRITE)
    for prompts in ("ab", "c"):
        asker = Asker(ledger, ENGINE)
        for prompt in prompts:
            asker.ask(prompt)
    ledger.write(ledger.asked, complete=True)
    for prompts, asked in (("ab", []), ("b", ["b"]), ("cb", ["c", "b"])):
        asker = Asker(Ledger(tmp_path, Mode.STORED), ENGINE)
        for prompt in prompts:
            asker.ask(prompt)
        assert asker.real.asked == asked


def test_a_flush_ends_the_past_but_for_lasting_calls(tmp_path: Path) -> None:
    def ask(asker: Asker) -> None:
        asker.ask("load", lasting=True)
        asker.flush()
        asker.ask("a")

    store(tmp_path, ask)
    ledger = Ledger(tmp_path, Mode.STORED)
    asker = Asker(ledger, ENGINE)
    asker.ask("load", lasting=True)
    asker.flush()
    asker.ask("a")
    asker.flush()
    asker.ask("a")
    assert asker.real.asked == []
    asker.flush()
    asker.ask("c")
    assert asker.real.asked == ["load", "c"]
    asker.flush()
    asker.ask("a")
    assert asker.real.asked == ["load", "c", "flush", "a"]

    other = Asker(ledger, ENGINE)
    other.ask("a")
    assert other.real.asked == ["a"]


def test_an_engine_that_remembers_nothing_may_be_asked_in_any_order(tmp_path: Path) -> None:
    written = Ledger(tmp_path, Mode.WRITE)
    first = Asker(written, ENGINE, remembers=False)
    for prompt in "ab":
        first.ask(prompt)
    written.write(written.asked, complete=True)
    asker = Asker(Ledger(tmp_path, Mode.STORED), ENGINE, remembers=False)
    for prompt in "ba":
        asker.ask(prompt)
    assert asker.real.asked == []


def test_another_engine_has_other_answers(ledger: Ledger) -> None:
    asker = Asker(ledger, {"model": "large"})
    asker.ask("a")
    assert asker.real.asked == ["a"]


# Modes --------------------------------------------------------------------------------------------


def test_the_variable_chooses_the_mode() -> None:
    assert Mode.chosen({}) is Mode.STORED
    assert Mode.chosen({VARIABLE: "off"}) is Mode.OFF
    with pytest.raises(ValueError, match=r"GOLDEN_ANSWERS=of .*stored, check, write, off"):
        Mode.chosen({VARIABLE: "of"})


@pytest.mark.parametrize("mode", [Mode.CHECK, Mode.WRITE, Mode.OFF])
def test_other_modes_ask_the_engine(ledger: Ledger, mode: Mode) -> None:
    ledger.mode = mode
    asker = Asker(ledger, ENGINE)
    asker.ask("a")
    assert asker.real.asked == ["a"]
    assert not ledger.used


def test_nothing_is_compared_when_off(ledger: Ledger) -> None:
    ledger.mode = Mode.OFF
    Asker(ledger, ENGINE).ask("c")
    assert not ledger.missing


def test_a_check_finds_answers_that_differ_and_are_missing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, Mode.WRITE)
    stored: dict[str, Any] = {"tokens": [1], "logprobs": [-0.5, None], "cached_tokens": 0}
    for key in "abcde":
        ledger.note(BOOK, key, stored)
    ledger.write(ledger.asked, complete=True)
    ledger = Ledger(tmp_path, Mode.CHECK)
    ledger.note(BOOK, "a", stored | {"logprobs": [-0.50001, None]})
    ledger.note(BOOK, "b", stored | {"logprobs": [-0.501, None]})
    ledger.note(BOOK, "c", stored | {"tokens": [2]})
    ledger.note(BOOK, "d", stored | {"cached_tokens": 16})
    ledger.note(BOOK, "e", stored | {"logprobs": [float("nan"), None]})
    ledger.note(BOOK, "f", stored)
    assert ledger.differing == {f"{BOOK} {key}" for key in "bcde"}
    assert ledger.missing == {f"{BOOK} f"}


def test_an_engine_that_answers_twice_differently_is_found_when_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, Mode.WRITE)
    ledger.note(BOOK, "a", "one")
    ledger.note(BOOK, "a", "another")
    assert ledger.differing == {f"{BOOK} a"}


def test_a_file_has_a_sorted_line_for_each_answer(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, Mode.WRITE)
    ledger.write({BOOK: {"b": [1, 2], "a": {"tokens": []}}}, complete=False)
    assert (tmp_path / f"{BOOK}.json").read_text() == '{\n"a": {"tokens":[]},\n"b": [1,2]\n}\n'
    assert Ledger(tmp_path, Mode.STORED).find(BOOK, "b") == [1, 2]


@pytest.mark.parametrize("complete", [True, False])
def test_only_a_complete_run_removes_answers(tmp_path: Path, complete: bool) -> None:
    for book in (BOOK, "engine-0"):
        Ledger(tmp_path, Mode.WRITE).write({book: {"old": 1, "again": 1}}, complete=False)
    Ledger(tmp_path, Mode.WRITE).write({BOOK: {"again": 2, "new": 3}}, complete=complete)
    found = json.loads((tmp_path / f"{BOOK}.json").read_text())
    assert found == {"again": 2, "new": 3} | ({} if complete else {"old": 1})
    assert (tmp_path / "engine-0.json").exists() is not complete


def test_numbers_are_rounded_in_live_answers_too(tmp_path: Path) -> None:
    asker = Asker(Ledger(tmp_path, Mode.OFF), ENGINE)
    assert asker.call("a", lambda: {"logprobs": [-0.123456789]}) == {"logprobs": [-0.123457]}


# Paths --------------------------------------------------------------------------------------------


def test_contents_stand_for_paths(tmp_path: Path) -> None:
    for name in ("one", "same", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("other" if name == "other" else "same")
    one, same, other = (f"a={tmp_path / name}" for name in ("one", "same", "other"))
    assert portable([one, 1, True]) == portable([same, 1, True])
    assert portable({"path": one}) != portable({"path": other})
    assert portable("/no/such/folder") == "/no/such/folder"
    (tmp_path / "same" / "weights").rename(tmp_path / "same" / "renamed")
    assert digest_of_files(tmp_path / "one") != digest_of_files(tmp_path / "same")


# vLLM ---------------------------------------------------------------------------------------------


class RealVllm:
    """Takes the place of `Engine`."""

    def __init__(self) -> None:
        self.starts = 0

    def start(self, config: EngineConfig) -> Any:
        self.starts += 1
        return self

    def generate(self, prompt: Sequence[int], **options: Any) -> Completion:
        return Completion(list(prompt[:2]), "length", 0, [0.1], [-1.5, -2.5])


def engine_config(folder: Path, weights: str = "weights", **changes: Any) -> EngineConfig:
    model = folder / f"model {len(list(folder.iterdir()))}"
    model.mkdir()
    (model / "model.safetensors").write_text(weights)
    return dataclasses.replace(EngineConfig(model, "float32", forked=True), **changes)


@pytest.fixture
def vllm(tmp_path: Path) -> Callable[..., tuple[Completion, int]]:
    """Asks a plain engine for an answer; the answer, and how many engines that started.

    The answer of the engine with unchanged options to the prompt [1, 2, 3] is stored.
    """
    golden, models = tmp_path / "golden", tmp_path / "models"
    models.mkdir()

    def ask(
        ledger: Ledger,
        prompt: Sequence[int] = (1, 2, 3),
        options: Mapping[str, Any] = MappingProxyType({}),
        **changes: Any,
    ) -> tuple[Completion, int]:
        real = RealVllm()
        engine = PlainEngine(real.start, engine_config(models, **changes), ledger)
        return engine.generate(prompt, **{"logprobs": True, **options}), real.starts

    ledger = Ledger(golden, Mode.WRITE)
    ask(ledger)
    ledger.write(ledger.asked, complete=True)
    return lambda **changes: ask(Ledger(golden, Mode.STORED), **changes)


def test_vllm_is_not_started_for_a_stored_answer(
    vllm: Callable[..., tuple[Completion, int]],
) -> None:
    answer, starts = vllm()
    assert answer == Completion([1, 2], "length", 0, [], [-1.5, -2.5])
    assert starts == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": [1, 2, 4]},
        {"options": {"max_tokens": 17}},
        {"options": {"logprobs": False}},
        {"options": {"cache_salt": "salt"}},
        {"options": {"adapter": Adapter("adapter", 1, Path(__file__))}},
        {"weights": "other weights"},
        {"block_size": 32},
        {"env": {"VLLM_ATTENTION_BACKEND": "other"}},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_vllm_is_started_for_any_other_answer(
    vllm: Callable[..., tuple[Completion, int]], changes: dict[str, Any]
) -> None:
    assert vllm(**changes)[1] == 1


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_only_an_engine_with_a_prefix_cache_remembers(tmp_path: Path, prefix_caching: bool) -> None:
    ledger, real = Ledger(tmp_path / "golden", Mode.WRITE), RealVllm()
    config = engine_config(tmp_path, prefix_caching=prefix_caching)
    for prompts in ([[1], [2]], [[2], [1]]):
        engine = PlainEngine(real.start, config, ledger)
        for prompt in prompts:
            engine.generate(prompt)
    (answers,) = ledger.asked.values()
    assert len(answers) == (4 if prefix_caching else 2)


def test_another_version_of_vllm_has_a_file_of_its_own(
    vllm: Callable[..., tuple[Completion, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_engine, "vllm_version", lambda: "0.0.1")
    assert vllm()[1] == 1


def test_an_engine_with_other_threads_has_other_answers(
    vllm: Callable[..., tuple[Completion, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = EngineConfig.environment
    monkeypatch.setattr(
        EngineConfig, "environment", lambda self: environment(self) | {"OMP_NUM_THREADS": "7"}
    )
    assert vllm()[1] == 1


def test_answers_in_bfloat16_are_not_stored(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "golden", Mode.WRITE)
    engine = PlainEngine(RealVllm().start, engine_config(tmp_path, dtype="bfloat16"), ledger)
    assert engine.generate([1, 2]).tokens == [1, 2]
    assert ledger.asked == {}


def test_an_engine_with_a_connector_is_not_plain(tmp_path: Path) -> None:
    config = engine_config(tmp_path, connector=connector.plugin())
    with pytest.raises(ValueError, match="plugin"):
        PlainEngine(RealVllm().start, config, Ledger(tmp_path, Mode.OFF))


# SGLang -------------------------------------------------------------------------------------------


class RealSglang:
    """Takes the place of `SglangServer`."""

    servers: list[RealSglang]

    def __init__(self, config: ServerConfig, log_path: Path) -> None:
        self.config = config
        self.asked: list[str] = []
        self.servers.append(self)

    def ask(self, path: str, body: Any, *_: Any) -> str:
        self.asked.append(path)
        if path != "/generate":
            return '{"success": true, "loaded": "adapters"}'
        finish = {"type": "length", "length": 8}
        meta = {"cached_tokens": 0, "finish_reason": finish, "e2e_latency": 0.1, "id": "random"}
        return json.dumps(
            [{"output_ids": ids[:2], "text": "", "meta_info": meta} for ids in body["input_ids"]]
        )

    def flush(self) -> None:
        self.asked.append("flush")

    def close(self) -> None:
        self.asked.append("close")


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PlainServer]:
    """Makes plain servers."""
    RealSglang.servers = []
    monkeypatch.setattr(plain_server, "SglangServer", RealSglang)
    monkeypatch.setattr(plain_server, "sglang_version", lambda: "0.0.1")
    (tmp_path / "models").mkdir()

    def made(mode: Mode, **changes: Any) -> PlainServer:
        weights = changes.pop("weights", "weights")
        model = engine_config(tmp_path / "models", weights).model
        config = dataclasses.replace(ServerConfig(model, TINY), **changes)
        return PlainServer(config, tmp_path / "log", Ledger(tmp_path / "golden", mode))

    return made


def converse(server: PlainServer, adapter: Path) -> list[object]:
    server.ask("/load_lora_adapter", {"lora_name": "one", "lora_path": str(adapter)})
    first = server.generate([1, 2, 3], lora_path="one")
    server.flush()
    return [first, *server.generate_all([[4, 5, 6], [7, 8, 9]])]


def written(server: PlainServer) -> None:
    ledger = server._ledger
    ledger.write(ledger.asked, complete=True)


def test_a_server_is_not_started_for_stored_answers(
    sglang: Callable[..., PlainServer], tmp_path: Path
) -> None:
    adapters = [tmp_path / "adapter 1", tmp_path / "adapter 2"]
    for each in adapters:
        each.mkdir()
        (each / "weights").touch()
    with sglang(Mode.WRITE) as server:
        live = converse(server, adapters[0])
    written(server)
    (real,) = RealSglang.servers
    assert real.asked == ["/load_lora_adapter", "/generate", "flush", "/generate", "close"]
    with sglang(Mode.STORED) as server:
        assert converse(server, adapters[1]) == live
        assert len(RealSglang.servers) == 1
        server.generate([1, 2])
    assert RealSglang.servers[1].asked == ["/load_lora_adapter", "/generate", "/generate", "close"]


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "other weights"},
        {"page_size": 1},
        {"flags": {"enable_mixed_chunk": True}},
        {"env": {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1"}},
        {"tensor_parallel_size": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_server_is_started_for_any_other_answer(
    sglang: Callable[..., PlainServer], changes: dict[str, Any]
) -> None:
    server = sglang(Mode.WRITE)
    server.generate([1, 2])
    written(server)
    sglang(Mode.STORED).generate([1, 2])
    assert len(RealSglang.servers) == 1
    sglang(Mode.STORED, **changes).generate([1, 2])
    assert len(RealSglang.servers) == 2


def test_a_servers_answers_in_bfloat16_are_not_stored(sglang: Callable[..., PlainServer]) -> None:
    server = sglang(Mode.WRITE, spec=dataclasses.replace(TINY, dtype="bfloat16"))
    assert server.generate([1, 2, 3]).tokens == [1, 2]
    assert server._ledger.asked == {}


def test_a_server_has_no_answer_to_other_requests(sglang: Callable[..., PlainServer]) -> None:
    with pytest.raises(ValueError, match="/server_info"):
        sglang(Mode.STORED).await_steps()


def test_a_server_with_flexkv_is_not_plain(sglang: Callable[..., PlainServer]) -> None:
    with pytest.raises(ValueError, match="enable_flexkv"):
        sglang(Mode.STORED, flags={"enable_flexkv": True})
