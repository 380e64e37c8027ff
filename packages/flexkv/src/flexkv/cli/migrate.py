# SPDX-License-Identifier: Apache-2.0
"""Translate a configuration of LMCache into settings of FlexKV. SOURCE is `env`, for the variables
of this shell, or a file: LMCache's own, values of the Helm chart of vLLM's production stack, or a
manifest of Kubernetes with LMCACHE_ variables. The output is a settings file for
FLEXKV_CONFIG_PATH; its comments name what to check and what has no equivalent. The command changes
nothing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from flexkv.cli.lmcaches_names import Translation, find, from_variables, translate
from flexkv.settings.settings_file import read_text
from flexkv.types.errors import ConfigError

NAME = "migrate"
HELP = "translate a configuration of LMCache"
_ENVIRONMENT = "env"
_FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
_MOST_RANKS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `Command.add_arguments`."""
    parser.add_argument("source", metavar="SOURCE", help="a file, or env")
    parser.add_argument(
        "--ranks",
        metavar="N",
        default="1",
        help="worker processes of an engine (tensor parallel size); LMCache's sizes are for each",
    )


def run(args: argparse.Namespace) -> int:
    """See `Command.run`."""
    if not args.ranks.isdecimal() or not 0 < int(args.ranks) <= _MOST_RANKS:
        raise ConfigError(
            f"--ranks is {args.ranks!r} on the command line; allowed: a whole number from 1 to "
            f"{_MOST_RANKS}"
        )
    found = list(_sources(args.source, os.environ))
    if not found:
        raise ConfigError(
            f"{args.source} has no setting of LMCache; allowed: LMCache's file, Helm values with "
            "lmcacheConfig, a manifest with LMCACHE_ variables, or env with these set"
        )
    for number, (origin, given) in enumerate(found):
        if number:
            print("---")
        print("\n".join(_lines(translate(origin, given, int(args.ranks)))))
    return 0


def _sources(source: str, environ: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    if source != _ENVIRONMENT:
        yield from _in_file(source)
        return
    if path := environ.get(_FILE_VARIABLE):
        yield from _in_file(path)  # LMCache ignores its variables then
    elif given := from_variables(environ):
        yield "the environment", given


def _in_file(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        documents = list(yaml.safe_load_all(read_text(path)))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot read {path}: {reason}; allowed: a YAML or JSON file") from None
    for document in documents:
        yield from find(document, path)


def _lines(made: Translation) -> Iterator[str]:
    yield f"# Settings of FlexKV for {made.origin}; use by FLEXKV_CONFIG_PATH"
    transfer = f'{{"kv_connector":"FlexKVConnectorV1","kv_role":"{made.role}"}}'
    yield f"# vllm serve MODEL --kv-transfer-config '{transfer}'"
    yield yaml.safe_dump(made.settings, sort_keys=False).rstrip() if made.settings else "{}"
    yield from (f"# check: {text}" for text in made.notes)
    yield from (f"# no equivalent: {text}" for text in made.missing)
    if made.needless:
        yield f"# not needed: {', '.join(made.needless)}"
