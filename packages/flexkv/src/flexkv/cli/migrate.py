# SPDX-License-Identifier: Apache-2.0
"""Translate a configuration of LMCache, or of vLLM's own offloading, into settings of FlexKV.
SOURCE is `env`, for the variables of this shell, or a file (- for standard input): LMCache's own,
values of the Helm chart of vLLM's production stack, or a manifest of Kubernetes with LMCACHE_
variables or with vLLM's arguments. The output is a settings file for FLEXKV_CONFIG_PATH; its
comments name what to check and what has no equivalent. The command changes nothing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import yaml

from flexkv.cli.input_text import STDIN, read_input
from flexkv.cli.lmcaches_names import Translation, find, from_variables, translate
from flexkv.cli.vllms_offloading import find_offloading
from flexkv.settings.settings_file import MOST_FILE_BYTES, read_text
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
    parser.add_argument("source", metavar="SOURCE", help="a file, - for standard input, or env")
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
    source = args.source
    if source == _ENVIRONMENT:
        found = [translate(*each, ranks) for each in _in_environment(os.environ)]
    else:
        name = "standard input" if source == STDIN else source
        read = partial(read_input, most_bytes=MOST_FILE_BYTES)
        documents = _documents(source, name, read)
        of_lmcache = [each for document in documents for each in find(document, name)]
        found = [translate(*each, ranks) for each in of_lmcache]
        found += [each for document in documents for each in find_offloading(document, name)]
    if not found:
        raise ConfigError(
            f"{source} has no setting of LMCache; allowed: LMCache's file, Helm values "
            "with lmcacheConfig, a manifest with LMCACHE_ variables or with vLLM's "
            "OffloadingConnector, or env with these variables set"
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


def _in_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    if path := environ.get(_FILE_VARIABLE):
        for document in _documents(path, path, read_text):
            yield from find(document, path)  # LMCache ignores its variables then
    elif given := from_variables(environ):
        if path := environ.get(_MOONCAKE_VARIABLE):
            given.setdefault("extra_config", _documents(path, path, read_text)[0])
        yield "the environment", given


def _documents(path: str, name: str, read: Callable[[str], str]) -> list[Any]:
    """The documents of a file, which messages call by a name."""
    try:
        return list(yaml.safe_load_all(read(path))) or [None]
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"cannot read {name}: {reason}; allowed: a YAML or JSON file") from None


def _lines(made: Translation) -> Iterator[str]:
    yield f"# Settings of FlexKV for {made.origin}; use by FLEXKV_CONFIG_PATH"
    transfer = f'{{"kv_connector":"FlexKVConnectorV1","kv_role":"{made.role}"}}'
    yield f"# vllm serve MODEL --kv-transfer-config '{transfer}'"
    yield yaml.safe_dump(made.settings, sort_keys=False).rstrip() if made.settings else "{}"
    yield from (f"# check: {text}" for text in made.notes)
    yield from (f"# no equivalent: {text}" for text in made.missing)
    if made.needless:
        yield f"# not needed: {', '.join(made.needless)}"
