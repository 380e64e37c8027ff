# SPDX-License-Identifier: Apache-2.0
"""The door of a toy engine: read by another thread, while the engine's own does nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asked_door import call_door
from toy_engine import BLOCK, ToyRequest
from toy_world import ToyWorld

from flexkv.operators.ask_door import AskError
from flexkv.session.state_reports import Subject, read_states
from flexkv.system.processes import pid_namespace
from integration.harness.ports import hold_port

PROMPT = [*range(3 * BLOCK)]
TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ToyWorld]:
    made = ToyWorld(tmp_path, slots=16, disk_slots=64)
    show(made, tmp_path)
    yield made
    made.close()


def show(world: ToyWorld, folder: Path) -> None:
    world.engine.side.show(world.config.session_root, "toy")


def lookup(folder: Path, **question: Any) -> Any:
    (answer,) = call_door(str(folder / "run"), "/lookup", **question)
    return answer


def test_an_idle_engine_says_which_tier_has_a_prompt(world: ToyWorld, tmp_path: Path) -> None:
    world.generate(PROMPT)
    world.settle()
    tiers = [{"tier": name, "blocks": 3, "is_sure": True} for name in ("host", "disk")]
    fingerprint = lookup(tmp_path, tokens=PROMPT)["fingerprint"]
    assert len(fingerprint) == 32
    about = {"engine": "toy", "pid": os.getpid(), "pid_namespace": pid_namespace()}
    about["block_tokens"] = BLOCK
    about["fingerprint"] = fingerprint
    assert lookup(tmp_path, tokens=PROMPT) == about | {"blocks": 3, "found": 3, "tiers": tiers}
    other = lookup(tmp_path, tokens=[*PROMPT[:-1], 77])
    assert (other["blocks"], other["found"]) == (3, 2)
    assert lookup(tmp_path, tokens=PROMPT, cache_salt="a")["found"] == 0
    hashes = [each.hex() for each in ToyRequest("q", PROMPT, 1).block_hashes]
    assert lookup(tmp_path, hashes=hashes)["tiers"] == tiers


def test_blocks_that_host_memory_has_evicted_are_on_disk(world: ToyWorld, tmp_path: Path) -> None:
    world.generate(PROMPT)
    world.settle()
    for number in range(6):
        world.generate([100 + number] * (4 * BLOCK))
        world.settle()
    found = lookup(tmp_path, tokens=PROMPT)
    assert found["found"] == 3
    assert [each["blocks"] for each in found["tiers"]] == [0, 3]


@pytest.mark.parametrize("path", ["/warm", "/demote", "/pin", "/remove"])
def test_a_prompt_below_one_block_has_nothing_to_change(
    world: ToyWorld, tmp_path: Path, path: str
) -> None:
    answer = call_door(str(tmp_path / "run"), path, tokens=[1])
    assert (answer["done"], answer["places"]["blocks"]) == (0, 0)


def test_what_is_no_question_is_refused(world: ToyWorld, tmp_path: Path) -> None:
    with pytest.raises(AskError, match="0 tokens and 0 hashes"):
        lookup(tmp_path)


def test_the_door_ends_with_the_engine_and_leaves_no_socket(tmp_path: Path) -> None:
    world = ToyWorld(tmp_path)
    threads = threading.active_count()
    show(world, tmp_path)
    run = tmp_path / "run"
    assert [each.stat().st_mode & 0o777 for each in run.glob("*.sock")].count(0o600) >= 1
    world.close()
    assert not list(run.glob("*.sock"))
    assert threading.active_count() <= threads
    assert read_states(str(run), Subject.HEALTH) == []


def test_an_engine_without_a_door_works_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = ToyWorld(tmp_path)
    tmp_path.joinpath("run").chmod(0o777)
    with caplog.at_level(logging.WARNING):
        show(world, tmp_path)
    assert "this engine has no door for flexkv lookup" in caplog.text
    tmp_path.joinpath("run").chmod(0o700)
    assert world.generate(PROMPT).has_ended
    world.close()


def ask_port(port: int, method: str, path: str, token: str = "", body: str = "") -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as peer:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        peer.request(method, path, body, headers)
        answer = peer.getresponse()
        return answer.status, answer.read().decode()


@pytest.fixture
def port() -> int:
    with hold_port() as held:
        return int(held.getsockname()[1])


@pytest.fixture
def world_at_port(tmp_path: Path, port: int) -> Iterator[ToyWorld]:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    world = ToyWorld(tmp_path, control_port=port, control_token_file=str(token))
    show(world, tmp_path)
    yield world
    world.close()


def test_the_port_answers_those_who_know_the_token(world_at_port: ToyWorld, port: int) -> None:
    world_at_port.generate(PROMPT)
    world_at_port.settle()
    body = json.dumps({"tokens": PROMPT})
    status, text = ask_port(port, "POST", "/lookup", TOKEN, body)
    assert (status, json.loads(text)[0]["found"]) == (200, 3)
    assert json.loads(ask_port(port, "POST", "/pin", TOKEN, body)[1])["done"] == 3
    for token in ("", "wrong", TOKEN[:-1], TOKEN + "0"):
        for method, path in (("POST", "/remove"), ("GET", "/openapi.json"), ("GET", "/")):
            assert ask_port(port, method, path, token, body) == (
                401,
                "the token is missing or wrong\n",
            )
    assert json.loads(ask_port(port, "POST", "/lookup", TOKEN, body)[1])[0]["found"] == 3


@pytest.mark.parametrize("path", ["/clear", "/unpin", "/lookup"])
def test_a_body_in_parts_is_refused_and_not_taken_for_an_empty_one(
    world_at_port: ToyWorld, port: int, path: str
) -> None:
    world_at_port.generate(PROMPT)
    world_at_port.settle()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as peer:

        def parts() -> Iterator[bytes]:
            yield b'{"tokens": [1]}'
            select.select([peer.sock], [], [])  # the answer is there
            yield from [bytes(1000)] * 1000

        headers = {"Authorization": f"Bearer {TOKEN}"}
        peer.request("POST", path, parts(), headers, encode_chunked=True)
        assert peer.getresponse().status == http.HTTPStatus.LENGTH_REQUIRED
    assert world_at_port.hits(PROMPT) == 3


@pytest.mark.parametrize("length", ["9" * 5000, "x"])
def test_a_length_that_is_no_number_of_bytes_is_refused(
    world_at_port: ToyWorld, port: int, length: str
) -> None:
    """Python reads no number of thousands of digits."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as peer:
        peer.putrequest("POST", "/lookup")
        peer.putheader("Authorization", f"Bearer {TOKEN}")
        peer.putheader("Content-Length", length)
        peer.endheaders()
        assert peer.getresponse().status == http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE


@pytest.mark.parametrize("body", ["", "{}", '{"blocks": "some"}', '{"blocks": true}'])
def test_a_clear_that_does_not_say_all_is_refused(
    world_at_port: ToyWorld, port: int, body: str
) -> None:
    world_at_port.generate(PROMPT)
    world_at_port.settle()
    assert ask_port(port, "POST", "/clear", TOKEN, body)[0] == 400
    assert world_at_port.hits(PROMPT) == 3


def test_the_port_describes_itself(world_at_port: ToyWorld, port: int) -> None:
    status, text = ask_port(port, "GET", "/openapi.json", TOKEN)
    described = json.loads(text)
    assert (status, described["openapi"]) == (200, "3.1.0")
    changes = {"/warm", "/demote", "/pin", "/unpin", "/remove", "/release"}
    changes |= {"/remove_session", "/clear"}
    assert set(described["paths"]) == {"/lookup"} | changes
    question = described["paths"]["/pin"]["post"]["requestBody"]["content"]["application/json"]
    fields = described["components"]["schemas"][question["schema"]["$ref"].rpartition("/")[2]]
    assert set(fields["properties"]) == {"tokens", "hashes", "cache_salt", "name", "seconds"}
    status, text = ask_port(port, "GET", "/none", TOKEN)
    assert (status, "allowed: GET /openapi.json, POST /lookup" in text) == (404, True)


def test_a_port_that_is_taken_leaves_the_socket(
    tmp_path: Path, world_at_port: ToyWorld, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    token = str(tmp_path / "token")
    other = ToyWorld(folder, control_port=port, control_token_file=token)
    with caplog.at_level(logging.WARNING):
        show(other, folder)
    assert f"control_port {port} cannot be used (Address already in use)" in caplog.text
    assert lookup(folder, tokens=PROMPT)["found"] == 0
    other.close()
