# SPDX-License-Identifier: Apache-2.0
"""Print where this user's running engines, or the `flexkv serve` in DIR, have the blocks of a
prompt. DIR is an engine's runtime_dir or a service's directory; default: the setting `service`,
else `runtime_dir`. FILE has token ids, as a JSON list, as the answer of vLLM's /tokenize, or
separated by blanks or commas; with --hashes it has the engine's hashes of its blocks, in hex. `-`
is standard input. A service knows hashes only. Nothing is loaded or computed. Exit code 0 if a
cache has the first block, 1 if none has it or none answers."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Iterator

import msgspec

from flexkv.cli.common import add_json, print_json, read_settings
from flexkv.control.ask_door import AskError, ask
from flexkv.control.http_door import RefusedError
from flexkv.control.prompts import AllPlaces, PromptPlaces, PromptQuestion, check_question
from flexkv.service.ask import find_prompt, is_service
from flexkv.session.state_reports import Subject, read_states
from flexkv.types.deadline import HungError, call_beside
from flexkv.types.errors import ArenaError, ConfigError
from flexkv.types.texts import blocks, printable

NAME = "lookup"
HELP = "print which tiers of running engines have a prompt"

_STDIN = "-"
_MOST_BYTES = 64 << 20
"""The longest input. Not tuned."""
_WORD = re.compile(r"[^\s,\[\]\"']+")
_SECONDS = 30.0
"""Time limit for the answer of an engine, which hashes long prompts beside its work. Not tuned."""


class _Tokenized(msgspec.Struct):
    """An answer of /tokenize of vLLM and SGLang."""

    tokens: list[int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `Command.add_arguments`."""
    parser.add_argument("file", metavar="FILE", help="file with the prompt, or -")
    parser.add_argument(
        "directory", metavar="DIR", nargs="?", help="an engine's runtime_dir, or a service's DIR"
    )
    parser.add_argument("--hashes", action="store_true", help="FILE has hashes of blocks")
    parser.add_argument(
        "--salt", metavar="SALT", default="", help="cache_salt of the requests; default: none"
    )
    parser.add_argument("--fingerprint", metavar="NAME", help="ask only caches of this fingerprint")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """See `Command.run`."""
    question = _question(args)
    root = args.directory or _default()
    try:
        answers, failed = call_beside(root, functools.partial(_ask, root, question, args))
    except (ArenaError, HungError) as error:
        raise ConfigError(str(error)) from None
    for reason in failed:
        print(reason, file=sys.stderr)
    if args.json:
        print_json(msgspec.to_builtins(answers))
    else:
        for each in answers:
            _print_places(each)
    return 0 if any(each.found for each in answers) else 1


def _default() -> str:
    config = read_settings()
    return config.service or config.session_root


def _question(args: argparse.Namespace) -> PromptQuestion:
    """The prompt on the command line.

    Raises:
        ConfigError: it is none.
    """
    words = _WORD.findall(_tokens_of(_read(args.file)))
    try:
        if args.hashes:
            question = PromptQuestion(hashes=tuple(map(str.lower, words)), cache_salt=args.salt)
        else:
            question = PromptQuestion(tokens=tuple(map(int, words)), cache_salt=args.salt)
        check_question(question)
    except ValueError as error:
        raise ConfigError(
            f"FILE is {args.file!r} on the command line and has no token ids ({error}); allowed: "
            "whole numbers, as a JSON list or separated by blanks or commas; hashes need --hashes"
        ) from None
    except RefusedError as error:
        raise ConfigError(f"FILE is {args.file!r} on the command line: {error}") from None
    return question


def _tokens_of(text: str) -> str:
    """The part of a text that has the prompt: that of an answer of /tokenize, which also names the
    model's longest context."""
    try:
        answer = msgspec.json.decode(text, type=_Tokenized)
    except msgspec.DecodeError:
        return text
    return " ".join(map(str, answer.tokens))


def _read(path: str) -> str:
    try:
        if path == _STDIN:
            text = sys.stdin.read(_MOST_BYTES)
        else:
            with open(path, encoding="utf-8") as file:
                text = file.read(_MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"FILE is {path!r} on the command line, which cannot be read: {reason}; allowed: a "
            "text file, or - for standard input"
        ) from None
    return text


def _ask(
    root: str, question: PromptQuestion, args: argparse.Namespace
) -> tuple[list[PromptPlaces], list[str]]:
    """The answers of the caches in a directory, and why others give none."""
    if _has_service(root):
        try:
            return list(find_prompt(root, question, args.fingerprint)), []
        except AskError as error:
            return [], [str(error)]
    answers: list[PromptPlaces] = []
    failed: list[str] = []
    body = msgspec.json.encode(question)
    doors = list(_doors(root, args.fingerprint))
    for name, door in doors:
        try:
            if not door:
                raise AskError(f"the {name} has no door; see its log")
            content = ask(root, door, name, ("POST", "/lookup"), body, seconds=_SECONDS)
            answers += msgspec.json.decode(content, type=AllPlaces)
        except AskError as error:
            failed.append(printable(str(error)))
        except msgspec.DecodeError as error:
            failed.append(f"{name} answers as another version of FlexKV does: {error}")
    if not doors:
        failed.append(f"no engine with FlexKV runs in {root!r}")
    return answers, failed


def _has_service(root: str) -> bool:
    try:
        return is_service(root)
    except OSError:
        return False


def _doors(root: str, fingerprint: str | None) -> Iterator[tuple[str, str]]:
    """Name and socket of each engine's door."""
    for report in read_states(root, Subject.HEALTH):
        if fingerprint in (None, report.get("fingerprint")):
            name = f"engine {report.get('engine')}, process {report.get('pid')},"
            yield printable(name), str(report.get("door") or "")


def _print_places(places: PromptPlaces) -> None:
    engine = printable(places.engine or "service")
    found = _count(places, places.found)
    print(
        f"{engine}, process {places.pid}, fingerprint {printable(places.fingerprint)}: "
        f"{found} of {blocks(places.blocks)}"
    )
    for tier in places.tiers:
        more = "" if tier.is_sure else ", and perhaps more: it was not asked"
        print(f"  {printable(tier.tier):<10}{_count(places, tier.blocks)}{more}")


def _count(places: PromptPlaces, count: int) -> str:
    if places.block_tokens is None:
        return f"{count:,}" if count else "nothing"
    return f"{count:,} ({count * places.block_tokens:,} tokens)" if count else "nothing"
