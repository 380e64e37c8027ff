# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import re
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from flexkv.version import __version__
from integration.harness.ports import hold_port
from packages.flexkv.tests.cli.screen import on_terminal
from packages.flexkv.tests.cli.served import Served, served
from packages.flexkv.tests.cli.stores import FINGERPRINT, Cache, Flexkv


def test_an_engine_is_shown_once_where_there_is_no_terminal(flexkv: Flexkv) -> None:
    with served() as engine:
        ended = flexkv("top", f"127.0.0.1:{engine.port}")
    assert (ended.code, ended.err) == (0, "")
    assert "vllm, chat" in ended.out
    assert "50.0 % since its start" in ended.out
    assert "prefill saved 2.5 s" in ended.out
    said = "host evicts by hazard, hits 1.25 of those of lru, in the order of lru now, 1,500 blocks"
    assert f"FlexKV {__version__}, {said}" in ended.out
    flat = " ".join(ended.out.replace("│", " ").split())
    assert "1,500 blocks expired in host, disk evicts by lru" in flat
    assert "2 x stalled of objects" in ended.out
    (host,) = re.findall(r"│ host .*", ended.out)
    assert host.split()[2:4] == ["25.0", "%"]
    assert "75.0 %" in host
    (objects,) = re.findall(r"│ objects .*", ended.out)
    assert "r off, w connecting" in objects
    assert not re.findall(r"│ (disk|mooncake) ", ended.out)  # are not configured
    assert re.search(r"device load .* 12\.00 MiB/s", ended.out)


def test_an_engine_is_asked_without_the_proxy_of_the_environment(
    flexkv: Flexkv, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with served() as engine:
        ended = flexkv("top", f"127.0.0.1:{engine.port}")
    assert (ended.code, ended.err) == (0, "")
    assert "vllm, chat" in ended.out


def test_two_engines_and_a_directory_are_shown(flexkv: Flexkv, cache: Cache) -> None:
    cache.fill(5, read=2)
    with served() as one, served("sglang:flexkv_", "coder") as two:
        urls = f"http://127.0.0.1:{one.port}/", f"http://127.0.0.1:{two.port}/metrics"
        ended = flexkv("top", *urls, cache.root, "--once")
    assert ended.code == 0
    assert "vllm, chat" in ended.out
    assert "sglang, coder" in ended.out
    (row,) = re.findall(rf"│ {FINGERPRINT} .*", ended.out)
    assert row.split()[2] == "-"  # nobody uses it
    assert ended.out.index("vllm") < ended.out.index("sglang") < ended.out.index(FINGERPRINT)


def test_a_terminal_obeys_no_engine(flexkv: Flexkv) -> None:
    with served(model="\x1b[2Jmine") as engine:
        ended = flexkv("top", f"127.0.0.1:{engine.port}")
    assert "\x1b" not in ended.out
    assert "?[2Jmine" in ended.out


def test_an_engine_that_does_not_answer_is_named_beside_one_that_does(flexkv: Flexkv) -> None:
    gone = Served()
    gone.start()
    gone.stop()
    with served() as engine:
        ended = flexkv("top", f"127.0.0.1:{engine.port}", f"127.0.0.1:{gone.port}")
    assert ended.code == 1
    assert "does not answer: Connection refused" in ended.out
    assert "50.0 % since its start" in ended.out


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_no_figure_is_cut_off_in_a_narrow_terminal(cache: Cache, columns: int) -> None:
    cache.fill(5, read=2)
    arguments = ("top", "--once", str(cache.root))
    with (
        served() as engine,
        on_terminal(*arguments, f"127.0.0.1:{engine.port}", columns=columns) as screen,
    ):
        shown = screen.end()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    lines = text.replace("\r", "").splitlines()
    assert max(map(len, lines)) <= columns
    assert "\u2026" not in text  # what rich puts in place of what it cuts off
    flat = " ".join(re.split(r"[\s\u2500-\u257f]+", text))
    for figure in ("25.0 %", "r off, w connecting", "12.00 MiB/s", "2 x stalled of objects"):
        assert figure in flat
    assert f"{FINGERPRINT[:16]}" in flat
    assert ("tier hit rate now tokens/s" in flat) is (columns == 200)
    assert ("circuits r off, w connecting" in flat) is (columns < 200)
    assert f"FlexKV {__version__}, host evicts by hazard, hits 1.25 of those of lru, in the" in flat


def test_an_engine_goes_away_and_comes_back() -> None:
    engine = Served()
    held = hold_port()  # so that nobody else answers while the engine is away
    port = held.getsockname()[1]
    engine.start(port)
    engine.work()
    with held, on_terminal("top", f"127.0.0.1:{port}", "--interval", "0.2") as screen:
        screen.wait_for("50.0 % since its start")
        engine.stop()
        screen.wait_for("the figures are old")
        engine.start(port)
        for _ in range(2):
            engine.work()
        screen.wait_for(r"\d\d:\d\d:\d\d\s+(\x1b\[\d+m)?[24] x stalled of objects")
        assert screen.interrupt() == 0
    engine.stop()


def test_q_ends_the_view_and_the_terminal_is_as_before() -> None:
    with served() as engine, on_terminal("top", f"127.0.0.1:{engine.port}") as screen:
        screen.wait_for("50.0 % since its start")
        assert screen.modes != screen.first_modes  # keys come without Enter
        screen.press("x")
        assert screen.end_by_key("q") == 0
        assert screen.modes == screen.first_modes


BAD = {
    "no target": [],
    "nothing": [""],
    "a path that does not exist": ["{folder}/none"],
    "a name that does not exist": ["none"],
    "a file": ["{folder}/file"],
    "a fifo": ["{folder}/fifo"],
    "another scheme": ["ftp://127.0.0.1:1"],
    "a file's address": ["file:///etc/passwd"],
    "an address without a host": ["http://"],
    "an address with a port and no host": ["http://:80"],
    "a port beyond all": ["http://127.0.0.1:65536"],
    "a port of 0": ["127.0.0.1:0"],
    "a port that is no number": ["http://127.0.0.1:x"],
    "a broken address": ["http://[::1"],
    "a password": ["http://me:secret@127.0.0.1:1"],
    "the same target twice": ["127.0.0.1:1", "127.0.0.1:1"],
    "too many targets": [f"127.0.0.1:{i}" for i in range(1, 18)],
    "no time between looks": ["127.0.0.1:1", "--interval", "0"],
    "a negative interval": ["127.0.0.1:1", "--interval=-1"],
    "an interval that is no number": ["127.0.0.1:1", "--interval", "soon"],
    "an interval that is not a number at all": ["127.0.0.1:1", "--interval", "nan"],
    "an endless interval": ["127.0.0.1:1", "--interval", "inf"],
    "an option that does not exist": ["127.0.0.1:1", "--twice"],
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error(flexkv: Flexkv, tmp_path: Path, case: str) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    ended = flexkv("top", *(each.format(folder=tmp_path) for each in BAD[case]))
    assert ended.code == 2
    assert ended.out == ""
    assert "secret" not in ended.err
    if "usage: " not in ended.err:
        assert ended.err.count("\n") == 1
        assert "; allowed: " in ended.err


class Strange(BaseHTTPRequestHandler):
    """Answers what is no engine's metrics."""

    def do_GET(self) -> None:
        code, body = ANSWERS[self.path]
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


ANSWERS = {
    "/missing": (404, b"no"),
    "/page": (200, b"<html>hello</html>"),
    "/bytes": (200, bytes(range(256))),
    "/others": (200, b"# TYPE x gauge\nx 1\n"),
    "/empty": (200, b""),
}
SAYS = {
    "/missing": "answers 404",
    "/page": "something else than metrics",
    "/bytes": "something else than metrics",
    "/others": "serves no metrics of FlexKV",
    "/empty": "serves no metrics of FlexKV",
}


@pytest.mark.parametrize("path", ANSWERS)
def test_an_address_that_is_no_engine_is_named(flexkv: Flexkv, path: str) -> None:
    server = HTTPServer(("127.0.0.1", 0), Strange)
    thread = Thread(target=server.serve_forever)
    thread.start()
    ended = flexkv("top", f"http://127.0.0.1:{server.server_port}{path}", "--once")
    server.shutdown()
    server.server_close()
    thread.join()
    assert ended.code == 1
    assert SAYS[path] in ended.out
    assert ended.err == ""


def test_a_directory_without_a_cache_is_named(flexkv: Flexkv, tmp_path: Path) -> None:
    ended = flexkv("top", tmp_path, "--once")
    assert ended.code == 1
    assert "holds no cache of FlexKV" in " ".join(re.split(r"[\s│]+", ended.out))
