# SPDX-License-Identifier: Apache-2.0
"""What the commands share that ask running engines about a prompt."""

from __future__ import annotations

import argparse
import re
import sys

import msgspec

from flexkv.cli.common import read_settings
from flexkv.cli.input_text import read_input
from flexkv.operators.ask_door import ask_engines
from flexkv.operators.verbs import PromptEffect, PromptPlaces, PromptQuestion, RefusedError, Verb
from flexkv.types.errors import ConfigError
from flexkv.types.texts import blocks, printable

_MOST_BYTES = 64 << 20
"""The longest FILE. Not tuned."""
_WORD = re.compile(r"[^\s,\[\]\"']+")


class _Tokenized(msgspec.Struct):
    """An answer of /tokenize of vLLM and SGLang."""

    tokens: list[int]


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a prompt, and of the directory of the engines that are asked."""
    parser.add_argument("file", metavar="FILE", help="file with the prompt, or -")
    add_engines(parser)
    parser.add_argument("--hashes", action="store_true", help="FILE has hashes of blocks")
    parser.add_argument(
        "--salt", metavar="SALT", default="", help="cache_salt of the requests; default: none"
    )


def add_engines(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the engines that are asked."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help="an engine's runtime_dir, or a service's DIR; default: the setting `service`, else "
        "`runtime_dir`",
    )
    parser.add_argument("--fingerprint", metavar="NAME", help="ask only caches of this fingerprint")


def directory_of(args: argparse.Namespace, *, of_engines: bool) -> str:
    """DIR of the command line, or of the settings.

    Args:
        args: of the command line.
        of_engines: whether a service cannot answer, but its engines can.
    """
    if args.directory:
        return str(args.directory)
    config = read_settings()
    return config.session_root if of_engines else config.service or config.session_root


def prompt_of(args: argparse.Namespace) -> PromptQuestion:
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
        question.check()
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
    except (msgspec.DecodeError, RecursionError):
        return text
    return " ".join(map(str, answer.tokens))


def _read(path: str) -> str:
    try:
        return read_input(path, _MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"FILE is {path!r} on the command line, which cannot be read: {reason}; allowed: a "
            "text file, or - for standard input"
        ) from None


def print_failed(failed: list[str]) -> None:
    """Print why engines give no answer, to standard error."""
    for reason in failed:
        print(reason, file=sys.stderr)


def name_of(places: PromptPlaces) -> str:
    """The cache that gave an answer, for people."""
    engine = printable(places.engine or "service")
    return f"{engine}, process {places.process}, fingerprint {printable(places.fingerprint)}"


def count_of(places: PromptPlaces, count: int) -> str:
    """So many blocks of a prompt, for people."""
    if places.block_tokens is None:
        return f"{count:,}" if count else "nothing"
    return f"{count:,} ({count * places.block_tokens:,} tokens)" if count else "nothing"


def print_effects(effects: list[PromptEffect], done: str) -> None:
    """Print what was done about a prompt; `done` says what, such as `pinned`."""
    for each in effects:
        places = each.places
        reason = f"; {printable(each.reason)}" if each.reason else ""
        print(
            f"{name_of(places)}: {done} {count_of(places, each.done)} of "
            f"{blocks(places.blocks)}{reason}"
        )


def change_prompt(
    args: argparse.Namespace, verb: Verb[PromptQuestion, PromptEffect], done: str
) -> tuple[list[PromptEffect], list[str]]:
    """Ask the engines to do something about the prompt on the command line, and print what they
    did.

    Args:
        args: of the command line.
        verb: what to ask.
        done: as for `print_effects`.

    Returns:
        What they did, and why other engines give no answer.

    Raises:
        ConfigError: there is no prompt, or the directory cannot be read.
    """
    question = prompt_of(args)
    root = directory_of(args, of_engines=True)
    effects, failed = ask_engines(root, args.fingerprint, verb, question)
    print_failed(failed)
    print_effects(effects, done)
    return effects, failed
