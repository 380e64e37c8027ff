# SPDX-License-Identifier: Apache-2.0
"""Standard streams that are closed, full or gone."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from flexkv import cli
from packages.flexkv.tests.cli.command import Fork, command_line
from packages.flexkv.tests.cli.stores import Cache, Ended

COMMANDS = [command.name for command in cli.COMMANDS if command.name != "serve"]
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
    "release": "a $EMPTY",
    "clear": "folders $DIR --yes",
    "doctor": "--seconds 0",
    "plan": "$TRACE --token-bytes 1000 --prefill-rate 1000 --max-memory-gb 1",
}
"""Of commands that need more than the cache, or do not take it."""

TRACE = """\
{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 9, "input_length": 1040, "output_length": 5, "hash_ids": [0, 1, 3]}
"""


@dataclass(frozen=True, slots=True)
class Streams:
    """Runs commands on a cache without, or with other, standard streams.

    Attributes:
        words: what stands for names in the arguments: $DIR is the cache, $TRACE a trace of
            requests, $PROMPT tokens, $EMPTY a directory.
    """

    words: Mapping[str, str]

    def run(self, line: str, **streams: Any) -> Ended:
        """The command with arguments, in a fork."""
        return checked(Fork(*self.arguments(line), **streams).end())

    def arguments(self, line: str) -> list[str]:
        return [self.words.get(word, word) for word in line.split()]

    def shell(self, script: str) -> Ended:
        """A script in a shell; $flexkv is the command in a new Python."""
        variables = {name.removeprefix("$"): word for name, word in self.words.items()}
        ended = subprocess.run(
            ["bash", "-c", script],
            env={**os.environ, **variables, "flexkv": shlex.join(command_line())},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        return checked(Ended(ended.returncode, ended.stdout, ended.stderr))


def checked(ended: Ended) -> Ended:
    assert "Traceback" not in ended.err, ended.err
    assert "Exception ignored" not in ended.err, ended.err
    return ended


@pytest.fixture
def streams(cache: Cache) -> Streams:
    """The cache has two blocks."""
    cache.fill(2)
    folder = cache.root.parent
    (folder / "trace.jsonl").write_text(TRACE, encoding="utf-8")
    (folder / "prompt").write_text("1 2 3", encoding="utf-8")
    (folder / "empty").mkdir()
    names = {
        "$DIR": "cache",
        "$TRACE": "trace.jsonl",
        "$PROMPT": "prompt",
        "$EMPTY": "empty",
    }
    return Streams({word: str(folder / name) for word, name in names.items()})


@pytest.fixture
def full() -> Iterator[int]:
    """A file on a full disk."""
    with open("/dev/full", "wb", buffering=0) as file:
        yield file.fileno()


@pytest.mark.parametrize("closed", [0, 2])
@pytest.mark.parametrize("name", COMMANDS)
def test_an_input_or_errors_that_are_closed_change_nothing(
    streams: Streams, cache: Cache, name: str, closed: int
) -> None:
    line = f"{name} {ARGUMENTS.get(name, '$DIR')}"
    # What the doctor finds depends on the machine. No engine runs whose health could be ok.
    fails = name in ("doctor", "health", *OF_ENGINES)
    expected = streams.run(line).code if fails else 0
    assert streams.run(line, closed=(closed,)).code == expected
    assert cache.folder.exists() == (name != "clear")


@pytest.mark.parametrize("closed", [(1,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("name", PRINTING)
def test_an_output_that_is_closed_is_an_error_after_the_work(
    streams: Streams, cache: Cache, name: str, closed: tuple[int, ...]
) -> None:
    ended = streams.run(f"{name} {ARGUMENTS.get(name, '$DIR')}", closed=closed)
    assert ended.code == 1
    said = f"flexkv {name}: error: the output cannot be written: Bad file descriptor\n"
    assert ended.err == ("" if 2 in closed else said)
    assert cache.folder.exists() == (name != "clear")


@pytest.mark.parametrize(
    ("streams_of_shell", "code", "reason"),
    [
        ("<&-", 0, ""),
        ("2>&-", 0, ""),
        (">&-", 1, "Bad file descriptor"),
        ("<&- >&- 2>&-", 1, ""),
        (">/dev/full", 1, "No space left on device"),
    ],
)
def test_a_new_process_has_the_streams_of_a_fork(
    streams: Streams, streams_of_shell: str, code: int, reason: str
) -> None:
    ended = streams.shell(f"$flexkv stat $DIR {streams_of_shell}")
    said = f"flexkv stat: error: the output cannot be written: {reason}\n"
    assert (ended.code, ended.err) == (code, said if reason else "")


def test_a_path_that_is_no_text_is_printed(streams: Streams, cache: Cache) -> None:
    odd = os.fsencode(cache.root.parent) + b"/kv-\xff"
    os.rename(cache.root, odd)
    ended = streams.run(f"stat {os.fsdecode(odd)}")
    assert ended.code == 0
    assert f"{cache.root.parent}/kv-\\udcff/" in ended.out
    assert streams.run(f"verify {os.fsdecode(odd)}").code == 0


def test_a_terminal_without_the_characters_gets_escapes(streams: Streams) -> None:
    ended = streams.shell(f"PYTHONIOENCODING=ascii $flexkv plan {ARGUMENTS['plan']}")
    assert ended.code == 0
    assert "\\u2588" in ended.out


def test_clear_without_an_input_needs_yes(streams: Streams, cache: Cache) -> None:
    ended = streams.run("clear folders $DIR", closed=(0,))
    assert ended.code == 2
    assert "--yes is missing" in ended.err
    assert cache.folder.exists()


@pytest.mark.parametrize("name", PRINTING)
def test_an_output_that_cannot_be_written_is_one_clear_error(
    streams: Streams, full: int, name: str
) -> None:
    ended = streams.run(f"{name} {ARGUMENTS.get(name, '$DIR')}", stdout=full)
    assert ended.code == 1
    assert ended.err == (
        f"flexkv {name}: error: the output cannot be written: No space left on device\n"
    )


@pytest.mark.parametrize("arguments", ["--help", "--version", "stat --help", "plan -h"])
@pytest.mark.parametrize("closed", [True, False])
def test_help_that_cannot_be_written_is_one_clear_error(
    streams: Streams, full: int, arguments: str, closed: bool
) -> None:
    ended = streams.run(arguments, **({"closed": (1,)} if closed else {"stdout": full}))
    reason = "Bad file descriptor" if closed else "No space left on device"
    assert ended.code == 1
    assert ended.err == f"flexkv: error: the output cannot be written: {reason}\n"


@pytest.mark.parametrize("output", [">/dev/full", ">&-"])
@pytest.mark.parametrize("arguments", ["--help", "--version"])
def test_help_without_a_buffer_that_cannot_be_written_is_the_same_error(
    streams: Streams, arguments: str, output: str
) -> None:
    ended = streams.shell(f"PYTHONUNBUFFERED=1 $flexkv {arguments} {output}")
    reason = "Bad file descriptor" if output == ">&-" else "No space left on device"
    assert ended.code == 1
    assert ended.err == f"flexkv: error: the output cannot be written: {reason}\n"


def test_wrong_usage_is_wrong_usage_without_an_output(streams: Streams, full: int) -> None:
    for output in (full, None):
        ended = streams.run("--nope", stdout=output)
        assert ended.code == 2
        assert ended.err.startswith("usage: flexkv")


def test_a_reader_that_has_enough_is_no_error(streams: Streams) -> None:
    ended = streams.shell("$flexkv stat $DIR | true; exit ${PIPESTATUS[0]}")
    assert ended.code in (0, 1)
    assert ended.err == ""


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
