# SPDX-License-Identifier: Apache-2.0
"""Check what an engine with FlexKV needs on this machine, and say what to change: settings, kernel,
memory, drives and their speed, GPU, packages, the engine's version. The settings are those of the
environment and of the file that FLEXKV_CONFIG_PATH names. The command changes nothing: it measures
a drive in a file without a name, which is gone when it ends. Exit code 0, or 1 if there is a
problem."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import asdict

from flexkv.cli.common import add_json, print_json, printable
from flexkv.cli.doctor_disk import check_directory
from flexkv.cli.doctor_engines import check_engines, check_packages
from flexkv.cli.doctor_findings import Check, Finding, Level, run_checks, unanswered
from flexkv.cli.doctor_host import (
    check_gpu,
    check_kernel,
    check_limits,
    check_memory,
    check_runtime_dir,
)
from flexkv.settings import GIB, SETTINGS, CacheConfig, load_config
from flexkv.types.deadline import ANSWER_SECONDS, call_within
from flexkv.types.errors import ConfigError

NAME = "doctor"
HELP = "check what an engine with FlexKV needs, and say what to change"

_SPEED_SECONDS = 1.0
"""Seconds to measure a drive by default. Not tuned."""
_MOST_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `Command.add_arguments`."""
    parser.add_argument(
        "--seconds",
        default=str(_SPEED_SECONDS),
        help="how long each drive is measured, half of it writing; 0 leaves the measurement out; "
        f"default: {_SPEED_SECONDS:g}",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """See `Command.run`."""
    seconds = _seconds(args.seconds)
    # The file of the settings may lie where nothing answers.
    read = call_within({"settings": _settings}, ANSWER_SECONDS)
    config, findings = read.get(
        "settings", (CacheConfig(), [unanswered("settings", ANSWER_SECONDS)])
    )
    checks: dict[str, Check] = {
        "kernel": check_kernel,
        "memory": functools.partial(check_memory, config),
        "limits": functools.partial(check_limits, config),
        "GPU": check_gpu,
        "packages": check_packages,
        "engine": functools.partial(check_engines, config),
        "runtime_dir": functools.partial(check_runtime_dir, config),
    }
    room = (config.ssd_cache_gb or 0.0) * GIB / max(1, len(config.ssd_cache_dir))
    for path in config.ssd_cache_dir:
        checks[f"disk {path}"] = functools.partial(check_directory, path, room, seconds)
    # Drives are measured at the same time, as an engine uses them.
    findings += run_checks(checks, seconds + ANSWER_SECONDS)
    _print(findings, as_json=args.json)
    return 1 if any(each.level is Level.PROBLEM for each in findings) else 0


def _settings() -> tuple[CacheConfig, list[Finding]]:
    """The settings in force, and the finding about them. If they are wrong, the defaults."""
    try:
        config = load_config()
    except ConfigError as error:
        text, _, allowed = str(error).partition("; allowed: ")
        found = Finding("settings", Level.PROBLEM, text, f"allowed: {allowed}" if allowed else "")
        return CacheConfig(), [found]
    if not config.enable:
        text = "FlexKV is turned off (ENABLE_FLEXKV)"
        return config, [Finding("settings", Level.ADVICE, text, "unset ENABLE_FLEXKV")]
    given = [
        # An address may hold a secret.
        f"{each.name}={'...' if each.kind.unit == 'URL' else getattr(config, each.name)!r}"
        for each in SETTINGS.values()
        if getattr(config, each.name) != each.default
    ]
    return config, [Finding("settings", Level.OK, ", ".join(given) or "all defaults")]


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


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MOST_SECONDS:
        raise ConfigError(
            f"--seconds is {text!r} on the command line; allowed: 0 to {_MOST_SECONDS:g}"
        )
    return value
