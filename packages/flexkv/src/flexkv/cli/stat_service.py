# SPDX-License-Identifier: Apache-2.0
"""The part of `flexkv stat` on services of nodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta

from flexkv.figures.definitions import (
    BLOCKS,
    BYTES,
    CAPACITY_BLOCKS,
    CAPACITY_BYTES,
    EXPIRED_BLOCKS,
    PINNED_BLOCKS,
    TIERS,
    sample,
)
from flexkv.operators.ask_door import AskError
from flexkv.service.ask import state_of
from flexkv.service.state import (
    FOUND_BLOCKS,
    GRANTED_BLOCKS,
    PROMPT_BLOCKS,
    STALLED_BLOCKS,
    EngineState,
    PoolState,
    ServiceState,
)
from flexkv.types.texts import blocks, printable, size


def ask_services(roots: Sequence[str]) -> tuple[dict[str, ServiceState], bool]:
    """Ask the services in these directories, and return the answers, and whether any is missing.
    Those that do not answer are named on standard error."""
    answers: dict[str, ServiceState] = {}
    for root in roots:
        try:
            answers[root] = state_of(root)
        except AskError as error:
            print(error, file=sys.stderr)
    return answers, len(answers) < len(roots)


def print_service(root: str, state: ServiceState) -> None:
    """Print the state of a service, and an empty line."""
    print(root)
    _print_line("service", f"FlexKV {printable(state.version)}, process {state.process}")
    _print_line("up", str(timedelta(seconds=int(state.seconds))))
    for problem in state.problems:
        _print_line("problem", problem)
    for pool in state.pools:
        _print_pool(pool)
    print("  no engine has attached yet" if not state.pools else "")


def _print_pool(pool: PoolState) -> None:
    print(f"  pool {printable(pool.fingerprint)}")
    _print_line("model", printable(pool.model))
    for part in pool.identity:
        if part.startswith(_SHOWN):
            _print_line("", printable(part))
    figures = pool.figures
    for tier in TIERS:
        room = figures.get(sample(CAPACITY_BLOCKS.name, tier))
        if not room:
            continue
        used, of = (figures[sample(each.name, tier)] for each in (BYTES, CAPACITY_BYTES))
        count = figures[sample(BLOCKS.name, tier)]
        expired = figures.get(sample(EXPIRED_BLOCKS.name, tier))
        _print_line(
            tier,
            f"{size(int(used))} of {size(int(of))}, {count:,.0f} of {room:,.0f} blocks"
            + (f", {expired:,.0f} expired" if expired else ""),
        )
    _print_line("block size", size(pool.slot_bytes))
    _print_line("policy", pool.policy)
    _print_line("pinned", blocks(int(figures.get(PINNED_BLOCKS.name, 0))))
    granted, stalled = (int(figures[each.name]) for each in (GRANTED_BLOCKS, STALLED_BLOCKS))
    _print_line("granted", blocks(granted) + (f", {stalled:,} stalled" if stalled else ""))
    prompts, found = (figures[each.name] for each in (PROMPT_BLOCKS, FOUND_BLOCKS))
    if prompts:
        _print_line("prompts", f"{prompts:,.0f} blocks, {100 * found / prompts:.1f} % found")
    for tenant in pool.tenants:
        name = printable(tenant.name) if tenant.name else "all others"
        _print_line("tenant", f"{name}: {tenant.blocks:,} blocks, share {tenant.share:,.0f}")
    for engine in pool.engines:
        _print_line("engine", _engine(engine))


_SHOWN = (
    "engine: ",
    "dtype: ",
    "kv_cache_dtype: ",
    "model_config.dtype: ",
    "cache_config.cache_dtype: ",
    "geometry: ",
)
"""The parts of a fingerprint by which people know a model, as either engine names them."""


def _engine(engine: EngineState) -> str:
    name = printable(engine.name)
    state = "attached" if engine.attached else "not attached"
    stalled = f", {engine.stalled_blocks:,} stalled" if engine.stalled_blocks else ""
    return (
        f"{name}: {state}, {blocks(engine.granted_blocks)} granted, {engine.held_blocks:,} held, "
        f"{engine.fetches} fetches{stalled}"
    )


def _print_line(name: str, value: str) -> None:
    print(f"    {name:<11}{value}")
