# SPDX-License-Identifier: Apache-2.0
"""The part of `flexkv clear` on all blocks of running engines."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from flexkv.cli.engines_asked import directory_of, print_failed
from flexkv.operators.ask_door import ask_engines, engines_in
from flexkv.operators.verbs import CLEAR, ClearEffect, ClearQuestion
from flexkv.types.texts import blocks, printable


def clear_engine(args: argparse.Namespace, agrees: Callable[[str, Sequence[str]], bool]) -> int:
    """Clear the caches of the engines.

    Args:
        args: of the command line.
        agrees: asks the user a question behind some lines.

    Returns:
        The exit code: 0 if there are engines, and none has a block left.

    Raises:
        ConfigError: the directory cannot be read.
    """
    directory = args.directories[0] if args.directories else None
    root = directory_of(argparse.Namespace(directory=directory), of_engines=True)
    engines = engines_in(root, args.fingerprint)
    if args.dry_run and engines:
        for each in engines:
            print(f"would clear {each}")
        return 0
    question = f"Clear the caches of {len(engines)} running engines in {root}?"
    if engines and not args.yes and not agrees(question, engines):
        print("nothing removed")
        return 1
    cleared, failed = ask_engines(root, args.fingerprint, CLEAR, ClearQuestion("all"))
    print_failed(failed)
    for effect in cleared:
        print(_line(effect))
    return 1 if failed or not cleared or any(effect.reason for effect in cleared) else 0


def _line(effect: ClearEffect) -> str:
    """What an engine has dropped, for people."""
    name = f"{effect.engine}, process {effect.process}, fingerprint {effect.fingerprint}"
    reason = f"; {effect.reason}" if effect.reason else ""
    return printable(f"{name}: cleared; host memory had {blocks(effect.blocks)}{reason}")
