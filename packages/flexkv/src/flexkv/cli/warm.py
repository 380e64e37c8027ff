# SPDX-License-Identifier: Apache-2.0
"""Have this user's running engines bring the blocks of a prompt from their lower tiers into host
memory, without computing. FILE is as for `flexkv lookup`. A quarter of host memory is warmed at
once. Exit code 0 if host memory has the first block then, 1 if no engine has it."""

from __future__ import annotations

import argparse

import msgspec

from flexkv.cli.engines_asked import (
    add_prompt,
    ask_engines,
    directory_of,
    print_effects,
    print_failed,
    prompt_of,
)
from flexkv.control.prompts import PromptEffect

NAME = "warm"
HELP = "bring a prompt from lower tiers into host memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `Command.add_arguments`."""
    add_prompt(parser)


def run(args: argparse.Namespace) -> int:
    """See `Command.run`."""
    body = msgspec.json.encode(prompt_of(args))
    root = directory_of(args, of_engines=True)
    answers, failed = ask_engines(root, args.fingerprint, "/warm", body, PromptEffect)
    print_failed(failed)
    print_effects(answers, "host memory has")
    return 0 if any(each.done for each in answers) else 1
