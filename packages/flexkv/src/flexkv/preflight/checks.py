# SPDX-License-Identifier: Apache-2.0
"""The list of checks, for `flexkv doctor` and for every start."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from flexkv.operators.engine_door import local_http
from flexkv.preflight.disk import check_directory, compare_directories, disk_name
from flexkv.preflight.engines import check_engines, check_packages
from flexkv.preflight.findings import Check, Finding, Level, refuse_start
from flexkv.preflight.host import (
    check_control,
    check_gpu,
    check_kernel,
    check_limits,
    check_memory,
    check_runtime_dir,
    check_service,
    check_trace_file,
    refuse_memory,
)
from flexkv.session.runtime_directory import check_runtime_directory
from flexkv.settings import GIB, CacheConfig
from flexkv.tiers.disk.folder import check_root
from flexkv.tiers.disk.opening import check_apart, places_of
from flexkv.tiers.shared_store import SharedStore, shared_stores

_START_SECONDS = 1.0
"""Seconds that a start waits for what may hang. It checks all of it later, too."""

_RUNTIME_DIR, _CONTROL = "runtime_dir", "control"


def all_checks(config: CacheConfig, seconds: float = 0.0) -> list[Check]:
    """All checks of the settings, in the order of the output. Each drive is measured for so many
    seconds; 0 for not at all."""
    part = functools.partial
    checks = [
        Check("kernel", check_kernel),
        Check("limits", part(check_limits, config)),
        Check("GPU", check_gpu),
        Check("packages", check_packages),
        Check("engine", part(check_engines, config)),
        Check(
            _RUNTIME_DIR,
            part(check_runtime_dir, config),
            part(check_runtime_directory, config.session_root),
        ),
        Check("service", part(check_service, config)),
        Check("trace", part(check_trace_file, config)),
        Check(_CONTROL, part(check_control, config), part(local_http, config)),
    ]
    # The service has memory and tiers; those of the engine's settings have no effect beside it.
    return checks if config.service is not None else checks + _checks_of_cache(config, seconds)


def check_start(config: CacheConfig, *, meets: bool = True) -> None:
    """Refuse a start that would fail, before an engine reads its weights, by the FlexKVError of the
    start. Unless processes meet in `runtime_dir`, a start does without it if need be."""
    if config.enable:
        left_out = () if meets else (_RUNTIME_DIR, _CONTROL)
        checks = [each for each in all_checks(config) if each.name not in left_out]
        refuse_start(checks, _START_SECONDS)


def _checks_of_cache(config: CacheConfig, seconds: float) -> list[Check]:
    part = functools.partial
    roots = config.ssd_cache_dir
    room = (config.ssd_cache_gb or 0.0) * GIB / max(1, len(roots))
    return [
        Check("memory", part(check_memory, config), part(refuse_memory, config)),
        *(
            Check(store.medium.value, part(check_store, config, store), part(store.refuse, config))
            for store in shared_stores(config)
        ),
        Check(
            "disks",
            part(compare_directories, roots),
            lambda: check_apart(places_of(roots)) if len(roots) > 1 else None,
        ),
        *(
            Check(
                disk_name(root), part(check_directory, root, room, seconds), part(check_root, root)
            )
            for root in roots
        ),
    ]


def check_store(config: CacheConfig, store: SharedStore) -> Iterator[Finding]:
    """Check whether the servers of a store answer. Joins and writes nothing."""
    name = store.medium.value
    for text, change in store.advice(config):
        yield Finding(name, Level.ADVICE, text, change)
    for server, ask in store.probes(config):
        try:
            ask()
        except OSError as error:
            change = "an engine starts without it, and uses it once it answers: start it, or "
            change += "correct its address and credentials"
            yield Finding(name, Level.PROBLEM, f"{server} cannot be used: {error}", change)
        else:
            yield Finding(name, Level.OK, f"{server} answers")
