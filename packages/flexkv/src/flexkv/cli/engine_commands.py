# SPDX-License-Identifier: Apache-2.0
"""The commands that ask this user's running engines about a prompt, a pin or a conversation; see
`flexkv.operators`."""

from __future__ import annotations

import argparse
import errno
import functools
import itertools
import re
import sys
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from flexkv.cli.common import (
    Command,
    add_json,
    default_root,
    has_service,
    print_json,
    read_settings,
)
from flexkv.operators import verbs
from flexkv.operators.ask_door import AskError, ask_engines, beside
from flexkv.operators.verbs import (
    ClearEffect,
    OperatorQuestion,
    PinQuestion,
    PromptEffect,
    PromptPlaces,
    PromptQuestion,
    RefusedError,
    SessionEffect,
    SessionQuestion,
    UnpinQuestion,
    Verb,
)
from flexkv.service.state import find_prompt
from flexkv.types.errors import ConfigError
from flexkv.types.texts import blocks, printable

_MOST_BYTES = 64 << 20
"""The longest FILE."""
_STDIN = "-"
_WORD = re.compile(r"[^\s,\[\]\"']+")

_Prompt = TypeVar("_Prompt", bound=PromptQuestion)


class _Tokenized(msgspec.Struct):
    """An answer of /tokenize of vLLM and SGLang."""

    tokens: list[int]


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a prompt, and of the engines that are asked."""
    parser.add_argument("file", metavar="FILE", help="file with the prompt, or -")
    add_engines(parser)
    parser.add_argument("--hashes", action="store_true", help="FILE has hashes of blocks")
    _add_salt(parser)


def add_session(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a conversation, and of the engines that are asked."""
    parser.add_argument(
        "session", metavar="NAME", help="name of the conversation, as clients give it"
    )
    add_engines(parser)
    _add_salt(parser)


def add_engines(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the engines that are asked."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help="an engine's runtime_dir, for `lookup` also a service's DIR; default: the setting "
        "`runtime_dir`, for `lookup` the setting `service` first",
    )
    parser.add_argument("--fingerprint", metavar="NAME", help="ask only caches of this fingerprint")


def _add_salt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--salt", metavar="SALT", default="", help="cache_salt of the requests; default: none"
    )


def directory_of(args: argparse.Namespace) -> str:
    """The engines' runtime directory, of the command line or of the settings."""
    return str(args.directory or read_settings().session_root)


def prompt_of(args: argparse.Namespace) -> PromptQuestion:
    """The prompt on the command line. Raises ConfigError if it is none."""
    words = _WORD.findall(_tokens_of(_read(args.file)))
    try:
        if args.hashes:
            question = PromptQuestion(hashes=tuple(map(str.lower, words)), cache_salt=args.salt)
        else:
            question = PromptQuestion(tokens=tuple(map(int, words)), cache_salt=args.salt)
    except ValueError as error:
        raise ConfigError(
            f"FILE is {args.file!r} on the command line and has no token ids ({error}); allowed: "
            "whole numbers, as a JSON list or separated by blanks or commas; hashes need --hashes"
        ) from None
    _check(question, f"FILE is {args.file!r} on the command line: ")
    return question


def _check(question: OperatorQuestion, where: str) -> None:
    try:
        question.check()
    except RefusedError as error:
        raise ConfigError(f"{where}{error}") from None


def _tokens_of(text: str) -> str:
    """The part of a text that has the prompt: that of an answer of /tokenize, which also names the
    model's longest context."""
    try:
        answer = msgspec.json.decode(text, type=_Tokenized)
    except (msgspec.DecodeError, RecursionError):
        return text
    return " ".join(map(str, answer.tokens))


def _read(path: str) -> str:
    """The text of a file, or of standard input. Waits for whoever writes to a pipe."""
    try:
        if path == _STDIN:
            data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"larger than {_MOST_BYTES} bytes")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"FILE is {path!r} on the command line, which cannot be read: {reason}; allowed: a "
            "text file, or - for standard input"
        ) from None


def print_failed(failed: Sequence[str]) -> None:
    """Print why engines give no answer, to standard error."""
    for reason in failed:
        print(reason, file=sys.stderr)


def change_prompt(
    args: argparse.Namespace, verb: Verb[_Prompt, PromptEffect], question: _Prompt, done: str
) -> tuple[list[PromptEffect], list[str]]:
    """Have the engines do something about a prompt, and print what they did: `done` is a word such
    as `pinned`. Returns that, and why other engines give no answer."""
    effects, failed = ask_engines(directory_of(args), args.fingerprint, verb, question)
    print_failed(failed)
    for each in effects:
        places = each.places
        print(
            f"{name_of(places)}: {done} {_count_of(places, each.done)} of "
            f"{blocks(places.blocks)}{reason_text(each.reason)}"
        )
    return effects, failed


def change_session(
    args: argparse.Namespace, verb: Verb[SessionQuestion, SessionEffect], done: str
) -> int:
    """Have the engines do something about the conversation on the command line, and print what
    they did: `done` is a word such as `removed`. Returns the exit code: 0 if an engine has done it,
    and all have answered."""
    question = session_of(args)
    answers, failed = ask_engines(directory_of(args), args.fingerprint, verb, question)
    print_failed(failed)
    for each in answers:
        what = f"{done} {blocks(each.blocks)}" if each.blocks else "knows no such conversation"
        print(f"process {each.process}: {what}{reason_text(each.reason)}")
    some = any(each.blocks for each in answers)
    return 1 if failed or not some or any(each.reason for each in answers) else 0


def session_of(args: argparse.Namespace) -> SessionQuestion:
    """The conversation on the command line. Raises ConfigError if none can have this name."""
    question = SessionQuestion(args.session, args.salt)
    _check(question, "NAME on the command line: ")
    return question


def reason_text(text: str) -> str:
    """Why not all was done, as the end of a line."""
    return f"; {printable(text)}" if text else ""


def name_of(cache: PromptPlaces | ClearEffect) -> str:
    """The name of the cache that an answer is about."""
    name = f"{cache.engine or 'service'}, process {cache.process}, fingerprint {cache.fingerprint}"
    return printable(name)


def _count_of(places: PromptPlaces, count: int) -> str:
    if not count:
        return "nothing"
    tokens = "" if places.block_tokens is None else f" ({count * places.block_tokens:,} tokens)"
    return f"{count:,}{tokens}"


def _lookup(args: argparse.Namespace) -> int:
    question = prompt_of(args)
    root = args.directory or default_root()
    found: Sequence[PromptPlaces] = ()
    failed: list[str] = []
    if beside(root, functools.partial(has_service, root)):
        try:
            found = find_prompt(root, question, args.fingerprint)
        except AskError as error:
            failed = [str(error)]
    else:
        answers, failed = ask_engines(root, args.fingerprint, verbs.LOOKUP, question)
        found = list(itertools.chain.from_iterable(answers))
    print_failed(failed)
    if args.json:
        print_json(msgspec.to_builtins(found))
    else:
        for each in found:
            _print_places(each)
    return 0 if any(each.found for each in found) else 1


def _print_places(places: PromptPlaces) -> None:
    print(f"{name_of(places)}: {_count_of(places, places.found)} of {blocks(places.blocks)}")
    for tier in places.tiers:
        more = "" if tier.is_sure else ", and perhaps more: it was not asked"
        print(f"  {printable(tier.tier):<10}{_count_of(places, tier.blocks)}{more}")


def _warm(args: argparse.Namespace) -> int:
    effects, _ = change_prompt(args, verbs.WARM, prompt_of(args), "host memory has")
    return 0 if any(each.done for each in effects) else 1


def _demote(args: argparse.Namespace) -> int:
    effects, failed = change_prompt(args, verbs.DEMOTE, prompt_of(args), "demoted")
    some = any(each.done for each in effects)
    return 1 if failed or not some or any(each.reason for each in effects) else 0


def _pin(args: argparse.Namespace) -> int:
    prompt = prompt_of(args)
    try:
        seconds = None if args.seconds is None else float(args.seconds)
    except ValueError:
        raise ConfigError(
            f"--seconds is {args.seconds!r} on the command line; allowed: a number"
        ) from None
    question = PinQuestion(prompt.tokens, prompt.hashes, prompt.cache_salt, args.name, seconds)
    _check(question, "on the command line, ")
    effects, _ = change_prompt(args, verbs.PIN, question, "pinned")
    return 0 if any(each.done for each in effects) else 1


def _unpin(args: argparse.Namespace) -> int:
    question = UnpinQuestion(args.name)
    answers, failed = ask_engines(directory_of(args), args.fingerprint, verbs.UNPIN, question)
    print_failed(failed)
    for each in answers:
        what = "the pins of name {!r} have ended" if each.was_pinned else "no pin has the name {!r}"
        print(f"process {each.process}: {what.format(each.name)}")
    return 0 if not failed and any(each.was_pinned for each in answers) else 1


def _release(args: argparse.Namespace) -> int:
    return change_session(args, verbs.RELEASE, "released")


def _add_lookup(parser: argparse.ArgumentParser) -> None:
    add_prompt(parser)
    add_json(parser)


def _add_pin(parser: argparse.ArgumentParser) -> None:
    add_prompt(parser)
    parser.add_argument("--name", default="default", help="name of the pin, for `flexkv unpin`")
    parser.add_argument(
        "--seconds", metavar="N", help="how long; default: the setting pin_seconds of the engine"
    )


def _add_unpin(parser: argparse.ArgumentParser) -> None:
    add_engines(parser)
    parser.add_argument("--name", default="default", help="name of the pins")


COMMANDS = (
    Command(
        "lookup",
        "print which tiers of running engines have a prompt",
        "Print where this user's running engines, or the `flexkv serve` in DIR, have the blocks of "
        "a prompt. FILE has token ids, as a JSON list, as the answer of vLLM's /tokenize, or "
        "separated by blanks or commas; with --hashes it has the engine's hashes of its blocks, in "
        "hex. `-` is standard input. A service knows hashes only. Nothing is loaded or computed. "
        "Exit code 0 if a cache has the first block, 1 if none has it or none answers.",
        _add_lookup,
        _lookup,
    ),
    Command(
        "warm",
        "bring a prompt from lower tiers into host memory",
        "Have this user's running engines bring the blocks of a prompt from their lower tiers into "
        "host memory, without computing. FILE is as for `flexkv lookup`. A quarter of host memory "
        "is warmed at once. Exit code 0 if host memory has the first block then, 1 if no engine "
        "has it.",
        add_prompt,
        _warm,
    ),
    Command(
        "demote",
        "move a prompt from host memory to lower tiers",
        "Have this user's running engines write the blocks of a prompt to their disks or shared "
        "stores, and free their host memory. FILE is as for `flexkv lookup`. Blocks that no lower "
        "tier takes stay. Exit code 0 if blocks have left host memory and none has to stay, 1 "
        "otherwise.",
        add_prompt,
        _demote,
    ),
    Command(
        "pin",
        "keep a prompt in host memory",
        "Have this user's running engines keep the blocks of a prompt in host memory. Blocks that "
        "only lower tiers have are not pinned: `flexkv warm` brings them up. FILE is as for "
        "`flexkv lookup`. Half of host memory can be pinned. Exit code 0 if blocks were pinned, 1 "
        "if none was.",
        _add_pin,
        _pin,
    ),
    Command(
        "unpin",
        "end the pins of a name",
        "End the pins of a name that `flexkv pin` has made in this user's running engines. Exit "
        "code 0 if an engine had such pins and all have answered, 1 otherwise.",
        _add_unpin,
        _unpin,
    ),
    Command(
        "release",
        "say that a conversation has ended",
        "Say that a conversation has ended: running engines of this user retain its blocks no "
        "longer, and `hazard` evicts those that no other conversation has first. Exit code 0 if "
        "an engine knows the conversation and all have answered, 1 otherwise.",
        add_session,
        _release,
    ),
)
