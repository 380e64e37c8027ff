# SPDX-License-Identifier: Apache-2.0
"""Which tests share an engine: they run one after the other, and on one worker of pytest-xdist.

Tests share what a fixture returns that is annotated as ``Engine`` or lives longer than a test, with
the same parameters. A test without such a fixture starts its own engines, and may run anywhere.
Unit tests share what a fixture of their module returns, so that only one worker makes it.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def in_turn(
    engines: Iterable[pytest.Item], others: Iterable[pytest.Item], *, two_at_a_time: bool
) -> list[pytest.Item]:
    """The order of all tests.

    Unit tests come first: they fail sooner. If two tests run at a time, those with engines come
    first, since pytest-xdist hands each worker two tests ahead, whatever the worker is busy with:
    short tests at the end let both workers end together. Tests marked ``alone`` are the very last:
    they wait for the other worker's test.
    """
    if not two_at_a_time:
        return [*others, *grouped(engines)]
    return [*grouped(engines), *sorted(map(_marked, others), key=_runs_alone)]


def grouped(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """``items`` group by group, each marked for pytest-xdist with its group.

    Tests marked ``proof`` come first, with the group that shares their engine. Groups that do not
    need the reference are next, for the worker that runs no proofs meanwhile; then those that do.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in map(_marked, items):
        groups.setdefault(shared_by(item) or item.nodeid, []).append(item)
    in_order = sorted(groups.values(), key=_turn)
    return [
        item for group in in_order for item in sorted(group, key=lambda item: not _proves(item))
    ]


def shared_by(item: pytest.Item) -> str:
    """What ``item`` shares with other tests: where the fixtures are defined, their names and their
    parameters; "" if it shares nothing."""
    definitions = _definitions(item)
    engines = [name for name, found in definitions.items() if _returns_engine(found)]
    wide = [name for name, found in definitions.items() if found.scope == "module"]
    shared = [f"{definitions[name].baseid}:{name}" for name in sorted(engines or wide)]
    chosen = [
        f"{name}={index}"
        for name, index in sorted(_indices(item).items())
        if name in definitions and definitions[name].params is not None
    ]
    return " ".join(shared + chosen) if shared else ""


def _marked(item: pytest.Item) -> pytest.Item:
    """`item`, with the group that pytest-xdist reads."""
    if shared := shared_by(item):
        item.add_marker(pytest.mark.xdist_group(shared))
    return item


def _turn(group: list[pytest.Item]) -> int:
    if any(map(_proves, group)):
        return 0
    return 1 + any("reference" in _definitions(item) for item in group)


def _runs_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


def _proves(item: pytest.Item) -> bool:
    return item.get_closest_marker("proof") is not None


def _definitions(item: pytest.Item) -> dict[str, pytest.FixtureDef[object]]:
    """The fixtures that ``item`` uses, itself or by others."""
    assert isinstance(item, pytest.Function)
    known = item._fixtureinfo.name2fixturedefs
    return {name: known[name][-1] for name in item.fixturenames if name in known}


def _returns_engine(fixture: pytest.FixtureDef[object]) -> bool:
    return fixture.func.__annotations__.get("return") == "Engine"


def _indices(item: pytest.Item) -> dict[str, int]:
    """Which of their values the parameters of ``item`` have."""
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.indices
