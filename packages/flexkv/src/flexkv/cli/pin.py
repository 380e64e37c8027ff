# SPDX-License-Identifier: Apache-2.0
"""Have this user's running engines keep the blocks of a prompt in host memory. Blocks that only
lower tiers have are not pinned: `flexkv warm` brings them up. FILE is as for `flexkv lookup`. Half
of host memory can be pinned. Exit code 0 if blocks were pinned, 1 if none was."""

from __future__ import annotations

import argparse

from flexkv.cli.engines_asked import (
    add_prompt,
    directory_of,
    print_effects,
    print_failed,
    prompt_of,
)
from flexkv.operators.ask_door import ask_engines
from flexkv.operators.verbs import PIN, PinQuestion, RefusedError
from flexkv.types.errors import ConfigError

NAME = "pin"
HELP = "keep a prompt in host memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `Command.add_arguments`."""
    add_prompt(parser)
    parser.add_argument("--name", default="default", help="name of the pin, for `flexkv unpin`")
    parser.add_argument(
        "--seconds", metavar="N", help="how long; default: the setting pin_seconds of the engine"
    )


def run(args: argparse.Namespace) -> int:
    """See `Command.run`."""
    prompt = prompt_of(args)
    try:
        seconds = None if args.seconds is None else float(args.seconds)
    except ValueError:
        raise ConfigError(
            f"--seconds is {args.seconds!r} on the command line; allowed: a number"
        ) from None
    pin = PinQuestion(prompt.tokens, prompt.hashes, prompt.cache_salt, args.name, seconds)
    try:
        pin.check()
    except RefusedError as error:
        raise ConfigError(f"on the command line, {error}") from None
    root = directory_of(args, of_engines=True)
    answers, failed = ask_engines(root, args.fingerprint, PIN, pin)
    print_failed(failed)
    print_effects(answers, "pinned")
    return 0 if any(each.done for each in answers) else 1
