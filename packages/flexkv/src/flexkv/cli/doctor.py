# SPDX-License-Identifier: Apache-2.0
"""Check what an engine with FlexKV needs on this machine, and say what to change: settings, kernel,
memory, drives and their speed, GPU, packages, the engine's version. The settings are those of the
environment and of the file that FLEXKV_CONFIG_PATH names. The command changes nothing: it measures
a drive in a file without a name, which is gone when it ends. Exit code 0, or 1 if there is a
problem."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from flexkv.cli.common import Command, add_json, number, print_json
from flexkv.preflight.checks import all_checks
from flexkv.preflight.findings import Finding, Level, problem_of, run_checks, unanswered
from flexkv.settings import SETTINGS, CacheConfig, load_config
from flexkv.settings.without_effect import lmcaches_variables, without_effect
from flexkv.types.deadline import ANSWER_SECONDS, call_within
from flexkv.types.errors import ConfigError
from flexkv.types.texts import printable

_SPEED_SECONDS = 1.0
"""Seconds to measure a drive by default."""
_MOST_SECONDS = 60.0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        default=_SPEED_SECONDS,
        type=number("--seconds", 0, _MOST_SECONDS),
        help="how long each drive is measured, half of it writing; 0 leaves the measurement out; "
        f"default: {_SPEED_SECONDS:g}",
    )
    add_json(parser)


def _run(args: argparse.Namespace) -> int:
    seconds: float = args.seconds
    # The file of the settings may lie where nothing answers.
    read = call_within({"settings": _settings}, ANSWER_SECONDS)
    config, findings = read.get(
        "settings", (CacheConfig(), [unanswered("settings", ANSWER_SECONDS)])
    )
    # Drives are measured at the same time, as an engine uses them.
    findings += run_checks(all_checks(config, seconds), seconds + ANSWER_SECONDS)
    _print(findings, as_json=args.json)
    return 1 if any(each.level is Level.PROBLEM for each in findings) else 0


def _settings() -> tuple[CacheConfig, list[Finding]]:
    """The settings in force, and the finding about them. If they are wrong, the defaults."""
    try:
        config = load_config()
    except ConfigError as error:
        return CacheConfig(), [problem_of("settings", error)]
    if not config.enable:
        text = "FlexKV is turned off (ENABLE_FLEXKV)"
        return config, [Finding("settings", Level.ADVICE, text, "unset ENABLE_FLEXKV")]
    given = [
        # An address may hold a secret.
        f"{each.name}={'...' if each.kind.unit == 'URL' else getattr(config, each.name)!r}"
        for each in SETTINGS.values()
        if getattr(config, each.name) != each.default
    ]
    unused = [
        Finding("settings", Level.ADVICE, sentence, "unset them, or set what they need")
        for sentence in without_effect(config)
    ]
    if theirs := lmcaches_variables():
        change = "set what FlexKV has in their place"
        unused.append(Finding("settings", Level.ADVICE, theirs, change))
    return config, [Finding("settings", Level.OK, ", ".join(given) or "all defaults"), *unused]


def _print(findings: Sequence[Finding], *, as_json: bool) -> None:
    if as_json:
        print_json([asdict(each) | {"level": each.level.value} for each in findings])
        return
    for each in findings:
        print(f"{each.level.value:<8} {each.check}: {_plain(each.text)}")
        if each.change:
            print(f"{'':<8} -> {_plain(each.change)}")
    problems = sum(each.level is Level.PROBLEM for each in findings)
    advice = sum(each.level is Level.ADVICE for each in findings)
    print(f"problems: {problems}, advice: {advice}")


def _plain(text: str) -> str:
    """Text of others in one line, as `printable` makes it."""
    return printable(" ".join(text.split()))


COMMAND = Command(
    "doctor",
    "check what an engine with FlexKV needs, and say what to change",
    __doc__,
    _add_arguments,
    _run,
)
