# SPDX-License-Identifier: Apache-2.0
"""Print the health of the caches of this user's running engines, or of the `flexkv serve` in DIR:
ok, degraded or off, and why. DIR is an engine's runtime_dir or a service's directory; default: the
setting `service`, else `runtime_dir`. An engine's health is that of its last step. Exit code 0 if
all caches are ok, 3 if one is degraded, 1 if one is off, no engine runs, or a service does not
answer."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import msgspec

from flexkv.cli.common import Command, add_json, default_root, has_service, print_json
from flexkv.figures.health_samples import health_text, problems_of, state_of
from flexkv.operators.ask_door import AskError, beside
from flexkv.service.state import state_of as service_state
from flexkv.session.state_reports import Subject, process_of, read_states
from flexkv.types.texts import printable
from flexkv.types.troubles import HealthState, Problem

_CODES = {HealthState.OK: 0, HealthState.DEGRADED: 3, HealthState.OFF: 1}


@dataclass(frozen=True, slots=True)
class CacheHealth:
    """The health of one cache: the engine with its process, or the service's directory with the
    pool; its state; and the state with all problems, for people."""

    name: str
    state: HealthState
    text: str


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directories", metavar="DIR", nargs="*", help="an engine's runtime_dir, or a service's DIR"
    )
    add_json(parser)


def _run(args: argparse.Namespace) -> int:
    roots: list[str] = args.directories or [default_root()]
    found = [each for root in roots for each in _health_in(root)]
    if args.json:
        print_json([asdict(each) for each in found])
    else:
        for each in found:
            print(f"{each.name}: {each.text}")
    order = list(HealthState)
    return _CODES[max((each.state for each in found), key=order.index)]


def _health_in(root: str) -> list[CacheHealth]:
    """The health of the caches in a directory, at least one."""
    return beside(root, functools.partial(_read, root))


def _read(root: str) -> list[CacheHealth]:
    if has_service(root):
        return _of_service(root)
    found = engines_health(root)
    return found or [
        CacheHealth(printable(root), HealthState.OFF, "off: no engine with FlexKV runs")
    ]


def engines_health(root: str) -> list[CacheHealth]:
    """The health of this user's running engines in a runtime directory. Raises ArenaError if it
    cannot be used."""
    return sorted(map(_of_engine, read_states(root, Subject.HEALTH)), key=lambda each: each.name)


def _of_service(root: str) -> list[CacheHealth]:
    name = printable(root)
    try:
        state = service_state(root)
    except AskError as error:
        return [CacheHealth(name, HealthState.OFF, f"off: {printable(str(error))}")]
    found = [
        CacheHealth(name, HealthState.DEGRADED, f"degraded: {printable(each)}")
        for each in state.troubles
    ]
    found += [
        _health(f"{name}, pool {printable(pool.fingerprint)}", problems_of(pool.figures))
        for pool in state.pools
    ]
    return found or [CacheHealth(name, HealthState.OK, "ok, no engine has attached yet")]


def _of_engine(report: Mapping[str, object]) -> CacheHealth:
    name = f"{report.get('engine')}, process {process_of(report)}"
    name = printable(f"{name}, fingerprint {report.get('fingerprint')}")
    try:
        return _health(name, msgspec.convert(report.get("problems"), list[Problem]))
    except msgspec.ValidationError:
        return CacheHealth(name, HealthState.OFF, "unknown: another version of FlexKV reports it")


def _health(name: str, problems: list[Problem]) -> CacheHealth:
    return CacheHealth(name, state_of(problems), health_text(problems))


COMMAND = Command(
    "health", "print whether caches are ok, degraded or off", __doc__, _add_arguments, _run
)
