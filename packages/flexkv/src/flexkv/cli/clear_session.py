# SPDX-License-Identifier: Apache-2.0
"""The part of `flexkv clear` on one conversation in running engines, and what `flexkv release` has
in common with it."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from flexkv.cli.engines_asked import directory_of, print_failed
from flexkv.operators.ask_door import ask_engines
from flexkv.operators.verbs import (
    REMOVE_SESSION,
    RefusedError,
    SessionEffect,
    SessionQuestion,
    Verb,
)
from flexkv.types.errors import ConfigError
from flexkv.types.texts import blocks, printable

OPTION = "--session"


def clear_session(args: argparse.Namespace, agrees: Callable[[str], bool]) -> int:
    """Clear a conversation in the engines.

    Args:
        args: of the command line.
        agrees: asks the user a question.

    Returns:
        The exit code.

    Raises:
        ConfigError: wrong usage.
    """
    directory = args.directories[0] if args.directories else None
    root = directory_of(argparse.Namespace(directory=directory), of_engines=True)
    shown = printable(args.session)
    if not args.yes and not agrees(f"Remove the blocks of {shown!r} in the engines of {root}?"):
        print("nothing removed")
        return 1
    return ask_about_session(args, root, REMOVE_SESSION, "removed")


def ask_about_session(
    args: argparse.Namespace, root: str, verb: Verb[SessionQuestion, SessionEffect], done: str
) -> int:
    """Ask the engines to do something about a conversation, and print what they did.

    Args:
        args: of the command line.
        root: the engines' runtime directory.
        verb: what to ask.
        done: what they did, such as `removed`.

    Returns:
        The exit code: 0 if an engine has done it, and all have answered.

    Raises:
        ConfigError: the name is not allowed.
    """
    question = SessionQuestion(args.session, args.salt or "")
    try:
        question.check()
    except RefusedError as error:
        raise ConfigError(f"{OPTION} on the command line: {error}") from None
    answers, failed = ask_engines(root, args.fingerprint, verb, question)
    print_failed(failed)
    for each in answers:
        reason = f"; {printable(each.reason)}" if each.reason else ""
        what = f"{done} {blocks(each.blocks)}" if each.blocks else "knows no such conversation"
        print(f"process {each.process}: {what}{reason}")
    some = any(each.blocks for each in answers)
    return 1 if failed or not some or any(each.reason for each in answers) else 0
