# SPDX-License-Identifier: Apache-2.0
"""Have this user's running engines bring the blocks of a prompt from their lower tiers into host
memory, without computing. FILE is as for `flexkv lookup`. A quarter of host memory is warmed at
once. Exit code 0 if host memory has the first block then, 1 if no engine has it."""

from __future__ import annotations

import argparse

from flexkv.cli.engines_asked import add_prompt, change_prompt
from flexkv.operators.verbs import WARM

NAME = "warm"
HELP = "bring a prompt from lower tiers into host memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `Command.add_arguments`."""
    add_prompt(parser)


def run(args: argparse.Namespace) -> int:
    """See `Command.run`."""
    answers, _ = change_prompt(args, WARM, "host memory has")
    return 0 if any(each.done for each in answers) else 1
