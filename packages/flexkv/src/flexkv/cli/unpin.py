# SPDX-License-Identifier: Apache-2.0
"""End the pins of a name that `flexkv pin` has made in this user's running engines. Exit code 0 if
an engine had such pins and all have answered, 1 otherwise."""

from __future__ import annotations

import argparse

from flexkv.cli.engines_asked import add_engines, directory_of, print_failed
from flexkv.operators.ask_door import ask_engines
from flexkv.operators.verbs import UNPIN, UnpinQuestion

NAME = "unpin"
HELP = "end the pins of a name"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `Command.add_arguments`."""
    add_engines(parser)
    parser.add_argument("--name", default="default", help="name of the pins")


def run(args: argparse.Namespace) -> int:
    """See `Command.run`."""
    question = UnpinQuestion(args.name)
    root = directory_of(args, of_engines=True)
    answers, failed = ask_engines(root, args.fingerprint, UNPIN, question)
    print_failed(failed)
    for each in answers:
        what = "the pins of name {!r} have ended" if each.was_pinned else "no pin has the name {!r}"
        print(f"process {each.process}: {what.format(each.name)}")
    return 0 if not failed and any(each.was_pinned for each in answers) else 1
