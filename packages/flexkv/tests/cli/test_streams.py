# SPDX-License-Identifier: Apache-2.0
"""Standard streams that are closed, full or gone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flexkv import cli
from packages.flexkv.tests.cli.stores import Cache

COMMANDS = [command.NAME for command in cli.COMMANDS if command.NAME != "serve"]
"""Those that end by themselves."""
OF_ENGINES = ["lookup", "warm", "demote", "pin", "unpin", "release"]
"""Those that print what running engines answer; none runs here."""
PRINTING = [name for name in COMMANDS if name not in OF_ENGINES]
ARGUMENTS = {
    "lookup": "$PROMPT $EMPTY",
    "warm": "$PROMPT $EMPTY",
    "demote": "$PROMPT $EMPTY",
    "pin": "$PROMPT $EMPTY",
    "unpin": "$EMPTY",
    "release": "$EMPTY --session a",
    "clear": "$DIR --yes",
    "doctor": "--seconds 0",
    "migrate": "$LMCACHE",
    "plan": "$TRACE --token-bytes 1000 --prefill-rate 1000 --max-memory-gb 1",
}
"""Of commands that need more than the cache, or do not take it."""

TRACE = """\
{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 9, "input_length": 1040, "output_length": 5, "hash_ids": [0, 1, 3]}
"""


def shell(script: str, cache: Cache) -> subprocess.CompletedProcess[str]:
    """`script` in a shell; $flexkv is the command, $DIR the cache, $TRACE a trace of requests,
    $LMCACHE a configuration of LMCache, $PROMPT tokens, $EMPTY a directory."""
    trace = cache.root.parent / "trace.jsonl"
    trace.write_text(TRACE, encoding="utf-8")
    lmcache = cache.root.parent / "lmcache.yaml"
    lmcache.write_text("chunk_size: 256\nmax_local_cpu_size: 5.0\n", encoding="utf-8")
    prompt, empty = cache.root.parent / "prompt", cache.root.parent / "empty"
    prompt.write_text("1 2 3", encoding="utf-8")
    empty.mkdir(exist_ok=True)
    flexkv = f"{sys.executable} -m flexkv"
    environment = {
        "flexkv": flexkv,
        "DIR": str(cache.root),
        "TRACE": str(trace),
        "LMCACHE": str(lmcache),
        "PROMPT": str(prompt),
        "EMPTY": str(empty),
    }
    ended = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    assert "Exception ignored" not in ended.stderr, ended.stderr
    return ended


@pytest.mark.parametrize("closed", ["<&-", "2>&-"])
@pytest.mark.parametrize("name", COMMANDS)
def test_an_input_or_errors_that_are_closed_change_nothing(
    cache: Cache, name: str, closed: str
) -> None:
    cache.fill(2)
    arguments = ARGUMENTS.get(name, "$DIR")
    # What the doctor finds depends on the machine. No engine runs whose health could be ok.
    fails = name in ("doctor", "health", *OF_ENGINES)
    expected = shell(f"$flexkv {name} {arguments}", cache).returncode if fails else 0
    assert shell(f"$flexkv {name} {arguments} {closed}", cache).returncode == expected
    assert cache.folder.exists() == (name != "clear")


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("name", PRINTING)
def test_an_output_that_is_closed_is_an_error_after_the_work(
    cache: Cache, name: str, closed: str
) -> None:
    cache.fill(2)
    ended = shell(f"$flexkv {name} {ARGUMENTS.get(name, '$DIR')} {closed}", cache)
    assert ended.returncode == 1
    said = f"flexkv {name}: error: the output cannot be written: Bad file descriptor\n"
    assert ended.stderr == ("" if "2>&-" in closed else said)
    assert cache.folder.exists() == (name != "clear")


def test_a_path_that_is_no_text_is_printed(cache: Cache) -> None:
    cache.fill(2)
    odd = os.fsencode(cache.root.parent) + b"/kv-\xff"
    os.rename(cache.root, odd)
    ended = shell(f"$flexkv stat {os.fsdecode(odd)}", cache)
    assert ended.returncode == 0
    assert f"{cache.root.parent}/kv-\\udcff/" in ended.stdout
    assert shell(f"$flexkv verify {os.fsdecode(odd)}", cache).returncode == 0


def test_a_terminal_without_the_characters_gets_escapes(cache: Cache) -> None:
    ended = shell(f"PYTHONIOENCODING=ascii $flexkv plan {ARGUMENTS['plan']}", cache)
    assert ended.returncode == 0
    assert "\\u2588" in ended.stdout


def test_clear_without_an_input_needs_yes(cache: Cache) -> None:
    cache.fill(1)
    ended = shell("$flexkv clear $DIR <&-", cache)
    assert ended.returncode == 2
    assert "--yes is missing" in ended.stderr
    assert cache.folder.exists()


@pytest.mark.parametrize("name", PRINTING)
def test_an_output_that_cannot_be_written_is_one_clear_error(cache: Cache, name: str) -> None:
    cache.fill(2)
    ended = shell(f"$flexkv {name} {ARGUMENTS.get(name, '$DIR')} >/dev/full", cache)
    assert ended.returncode == 1
    assert ended.stderr == (
        f"flexkv {name}: error: the output cannot be written: No space left on device\n"
    )


@pytest.mark.parametrize("arguments", ["--help", "--version", "stat --help", "plan -h"])
@pytest.mark.parametrize(
    ("output", "reason"),
    [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_help_that_cannot_be_written_is_one_clear_error(
    cache: Cache, arguments: str, output: str, reason: str, unbuffered: str
) -> None:
    ended = shell(f"PYTHONUNBUFFERED={unbuffered} $flexkv {arguments} {output}", cache)
    assert ended.returncode == 1
    assert ended.stderr == f"flexkv: error: the output cannot be written: {reason}\n"


def test_wrong_usage_is_wrong_usage_without_an_output(cache: Cache) -> None:
    for output in (">/dev/full", ""):
        ended = shell(f"$flexkv --nope {output}", cache)
        assert ended.returncode == 2
        assert ended.stderr.startswith("usage: flexkv")


def test_a_reader_that_has_enough_is_no_error(cache: Cache) -> None:
    cache.fill(2)
    ended = shell("$flexkv stat $DIR | true; exit ${PIPESTATUS[0]}", cache)
    assert ended.returncode in (0, 1)
    assert ended.stderr == ""


def test_what_is_written_last_is_not_lost() -> None:
    """Nothing ends the interpreter, which would write out the streams' buffers."""
    script = (
        "import sys\nfrom flexkv import cli\n"
        "cli.main = lambda: sys.stdout.write('out') and sys.stderr.write('err')\n"
        "cli.run()"
    )
    command = [sys.executable, "-c", script]
    environment = {name: each for name, each in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("out", "err", 3)
