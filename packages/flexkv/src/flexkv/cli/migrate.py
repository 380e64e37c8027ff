# SPDX-License-Identifier: Apache-2.0
"""Translate a configuration of LMCache, or of vLLM's own offloading, into settings of FlexKV.
SOURCE is `env`, for the variables of this shell, or a file: LMCache's own, values of the Helm chart
of vLLM's production stack, or a manifest of Kubernetes with LMCACHE_ variables or with vLLM's
arguments. The output is a settings file for
FLEXKV_CONFIG_PATH; its comments name what to check and what has no equivalent. The command changes
nothing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from flexkv.cli.lmcaches_names import Translation, find, from_variables, translate
from flexkv.cli.vllms_offloading import find_offloading
from flexkv.settings.settings_file import read_text
from flexkv.types.errors import ConfigError

NAME = "migrate"
HELP = "translate a configuration of LMCache or vLLM"
_ENVIRONMENT = "env"
_MOONCAKE_VARIABLE = "MOONCAKE_CONFIG_PATH"
_FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
_MOST_RANKS = 4096
_DIGITS = 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `Command.add_arguments`."""
    parser.add_argument("source", metavar="SOURCE", help="a file, or env")
    parser.add_argument(
        "--ranks",
        metavar="N",
        default="1",
        help="worker processes of an engine (tensor parallel size); LMCache's sizes are for each",
    )
    parser.add_argument(
        "--only",
        metavar="N",
        help="print one engine of a file that has several, by its number; a settings file has one",
    )


def run(args: argparse.Namespace) -> int:
    """See `Command.run`."""
    ranks = _number("--ranks", args.ranks, _MOST_RANKS)
    found = [translate(*each, ranks) for each in _sources(args.source, os.environ)]
    if args.source != _ENVIRONMENT:
        for document in _documents(args.source):
            found += find_offloading(document, args.source)
    if not found:
        raise ConfigError(
            f"{args.source} has no setting of LMCache; allowed: LMCache's file, Helm values with "
            "lmcacheConfig, a manifest with LMCACHE_ variables or with vLLM's OffloadingConnector, "
            "or env with these variables set"
        )
    chosen = range(1, len(found) + 1)
    if args.only is not None:
        only = _number("--only", args.only, len(found))
        chosen = range(only, only + 1)
    for number in chosen:
        if number > chosen[0]:
            print("---")
        if len(chosen) > 1:
            print(f"# Engine {number} of {len(found)}. For a file with this one: --only {number}")
        print("\n".join(_lines(found[number - 1])))
    return 0


def _number(option: str, text: str, most: int) -> int:
    if not (text.isdecimal() and len(text) < _DIGITS and 0 < int(text) <= most):
        raise ConfigError(
            f"{option} is {text!r} on the command line; allowed: a whole number from 1 to {most}"
        )
    return int(text)


def _sources(source: str, environ: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    if source != _ENVIRONMENT:
        yield from _in_file(source)
        return
    if path := environ.get(_FILE_VARIABLE):
        yield from _in_file(path)  # LMCache ignores its variables then
    elif given := from_variables(environ):
        if path := environ.get(_MOONCAKE_VARIABLE):
            given.setdefault("extra_config", _documents(path)[0])
        yield "the environment", given


def _in_file(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for document in _documents(path):
        yield from find(document, path)


def _documents(path: str) -> list[Any]:
    try:
        return list(yaml.safe_load_all(read_text(path))) or [None]
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"cannot read {path}: {reason}; allowed: a YAML or JSON file") from None


def _lines(made: Translation) -> Iterator[str]:
    yield f"# Settings of FlexKV for {made.origin}; use by FLEXKV_CONFIG_PATH"
    transfer = f'{{"kv_connector":"FlexKVConnectorV1","kv_role":"{made.role}"}}'
    yield f"# vllm serve MODEL --kv-transfer-config '{transfer}'"
    yield yaml.safe_dump(made.settings, sort_keys=False).rstrip() if made.settings else "{}"
    yield from (f"# check: {text}" for text in made.notes)
    yield from (f"# no equivalent: {text}" for text in made.missing)
    if made.needless:
        yield f"# not needed: {', '.join(made.needless)}"
