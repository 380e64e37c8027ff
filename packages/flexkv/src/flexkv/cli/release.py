# SPDX-License-Identifier: Apache-2.0
"""Say that a conversation has ended: running engines of this user retain its blocks no longer, and
`hazard` evicts those that no other conversation has first. Exit code 0 if an engine knows the
conversation and all have answered, 1 otherwise."""

from __future__ import annotations

import argparse

from flexkv.cli.clear_session import OPTION, ask_about_session
from flexkv.cli.engines_asked import add_engines, directory_of
from flexkv.operators.verbs import RELEASE

NAME = "release"
HELP = "say that a conversation has ended"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `Command.add_arguments`."""
    add_engines(parser)
    parser.add_argument(
        OPTION, metavar="NAME", required=True, help="name of the conversation, as clients give it"
    )
    parser.add_argument(
        "--salt", metavar="SALT", default="", help="cache_salt of its requests; default: none"
    )


def run(args: argparse.Namespace) -> int:
    """See `Command.run`."""
    return ask_about_session(args, directory_of(args, of_engines=True), RELEASE, "released")
