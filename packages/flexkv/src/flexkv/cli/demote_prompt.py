# SPDX-License-Identifier: Apache-2.0
"""Have this user's running engines write the blocks of a prompt to their disks or shared stores,
and free their host memory. FILE is as for `flexkv lookup`. Blocks that no lower tier takes stay.
Exit code 0 if blocks have left host memory and none has to stay, 1 otherwise."""

from __future__ import annotations

import argparse

from flexkv.cli.engines_asked import add_prompt, change_prompt
from flexkv.operators.verbs import DEMOTE

NAME = "demote"
HELP = "move a prompt from host memory to lower tiers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `Command.add_arguments`."""
    add_prompt(parser)


def run(args: argparse.Namespace) -> int:
    """See `Command.run`."""
    answers, failed = change_prompt(args, DEMOTE, "demoted")
    some = any(each.done for each in answers)
    return 1 if failed or not some or any(each.reason for each in answers) else 0
