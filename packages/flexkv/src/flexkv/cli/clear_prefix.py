# SPDX-License-Identifier: Apache-2.0
"""The part of `flexkv clear` on one prompt in running engines."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from flexkv.cli.engines_asked import directory_of, print_effects, print_failed, prompt_of
from flexkv.operators.ask_door import ask_engines
from flexkv.operators.verbs import REMOVE


def add_prefix(parser: argparse.ArgumentParser) -> None:
    """Add the options of a prompt."""
    parser.add_argument(
        "--prefix",
        metavar="FILE",
        help="have the running engines whose runtime_dir is DIR remove the blocks of the prompt in "
        "FILE, or - for standard input; see `flexkv lookup`",
    )
    parser.add_argument("--hashes", action="store_true", help="FILE has hashes of blocks")
    parser.add_argument("--salt", metavar="SALT", help="cache_salt of the requests")


def clear_prefix(args: argparse.Namespace, agrees: Callable[[str], bool]) -> int:
    """Clear a prompt in the engines.

    Args:
        args: of the command line.
        agrees: asks the user a question.

    Returns:
        The exit code.

    Raises:
        ConfigError: wrong usage.
    """
    chosen = argparse.Namespace(
        file=args.prefix,
        hashes=args.hashes,
        salt=args.salt or "",
        directory=args.directories[0] if args.directories else None,
    )
    prompt, root = prompt_of(chosen), directory_of(chosen, of_engines=True)
    if not args.yes and not agrees(f"Remove the blocks of this prompt in the engines of {root}?"):
        print("nothing removed")
        return 1
    answers, failed = ask_engines(root, args.fingerprint, REMOVE, prompt)
    print_failed(failed)
    print_effects(answers, "removed")
    stays = any(each.places.found or each.reason for each in answers)
    return 1 if failed or stays or not answers else 0
