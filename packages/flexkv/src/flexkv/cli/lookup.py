# SPDX-License-Identifier: Apache-2.0
"""Print where this user's running engines, or the `flexkv serve` in DIR, have the blocks of a
prompt. DIR is an engine's runtime_dir or a service's directory; default: the setting `service`,
else `runtime_dir`. FILE has token ids, as a JSON list, as the answer of vLLM's /tokenize, or
separated by blanks or commas; with --hashes it has the engine's hashes of its blocks, in hex. `-`
is standard input. A service knows hashes only. Nothing is loaded or computed. Exit code 0 if a
cache has the first block, 1 if none has it or none answers."""

from __future__ import annotations

import argparse
import functools
import itertools

import msgspec

from flexkv.cli.common import add_json, print_json
from flexkv.cli.engines_asked import (
    add_prompt,
    count_of,
    directory_of,
    name_of,
    print_failed,
    prompt_of,
)
from flexkv.operators.ask_door import ask_engines
from flexkv.operators.verbs import LOOKUP, PromptPlaces, PromptQuestion
from flexkv.service.ask import ServiceError, find_prompt, is_service
from flexkv.types.deadline import HungError, call_beside
from flexkv.types.errors import ConfigError
from flexkv.types.texts import blocks, printable

NAME = "lookup"
HELP = "print which tiers of running engines have a prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `Command.add_arguments`."""
    add_prompt(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """See `Command.run`."""
    question = prompt_of(args)
    root = directory_of(args, of_engines=False)
    if _has_service(root):
        found, failed = _ask_service(root, question, args.fingerprint)
    else:
        answers, failed = ask_engines(root, args.fingerprint, LOOKUP, question)
        found = list(itertools.chain.from_iterable(answers))
    print_failed(failed)
    if args.json:
        print_json(msgspec.to_builtins(found))
    else:
        for each in found:
            _print_places(each)
    return 0 if any(each.found for each in found) else 1


def _ask_service(
    root: str, question: PromptQuestion, fingerprint: str | None
) -> tuple[list[PromptPlaces], list[str]]:
    """What the pools of a service have, and why there is no answer."""
    try:
        return list(find_prompt(root, question, fingerprint)), []
    except ServiceError as error:
        return [], [str(error)]


def _has_service(root: str) -> bool:
    try:
        return call_beside(root, functools.partial(is_service, root))
    except OSError:
        return False  # as a runtime directory it gives the clearer error
    except HungError as error:
        raise ConfigError(str(error)) from None


def _print_places(places: PromptPlaces) -> None:
    print(f"{name_of(places)}: {count_of(places, places.found)} of {blocks(places.blocks)}")
    for tier in places.tiers:
        more = "" if tier.is_sure else ", and perhaps more: it was not asked"
        print(f"  {printable(tier.tier):<10}{count_of(places, tier.blocks)}{more}")
