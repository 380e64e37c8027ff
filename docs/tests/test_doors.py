# SPDX-License-Identifier: Apache-2.0
"""Engines and their adapters reach a cache through `flexkv.client` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from docs.import_graph import ROOT, SOURCES
from flexkv.client import CacheClient

ABOVE = ("flexkv.engine", "flexkv_sglang", "flexkv_vllm")
BELOW = ("flexkv.cache", "flexkv.index", "flexkv.tiers", "flexkv.transfer")

MOST_MEMBERS = 30
"""Members of `CacheClient`. The number may only fall."""

STARTERS = {
    "flexkv.engine.start",
    "flexkv_vllm.offloading.start_tier",
    "flexkv_vllm.offloading.tier",
}
"""The modules that start a cache or its tiers, so they import what they start. Under vLLM's own
memory there is no cache of ours: tiers alone are below."""

PUBLIC = {"KVCache": "flexkv.cache"}
"""Names of the package `flexkv` itself that are below the door, and their modules."""


def reaches(root: Path) -> dict[str, set[str]]:
    """For each module above the door the modules below it that it imports, also for types, in a
    function, or from the package `flexkv`."""
    found: dict[str, set[str]] = {}
    for source in SOURCES:
        for file in root.joinpath(source).rglob("*.py"):
            parts = file.relative_to(root / source).with_suffix("").parts
            name = ".".join(parts).removesuffix(".__init__")
            if _is_in(name, ABOVE):
                modules = {each for each in _imported(file) if _is_in(each, BELOW)}
                if modules:
                    found[name] = modules
    return found


def _imported(file: Path) -> Iterable[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom(module="flexkv", names=names):
                yield from (PUBLIC.get(each.name, f"flexkv.{each.name}") for each in names)
            case ast.ImportFrom(module=str(module)):
                yield module
            case ast.Import(names=names):
                yield from (each.name for each in names)


def _is_in(module: str, packages: Iterable[str]) -> bool:
    return any(module == each or module.startswith(each + ".") for each in packages)


def test_only_modules_that_start_a_cache_import_what_is_below_the_door() -> None:
    found = reaches(ROOT)
    new = {module: imported for module, imported in found.items() if module not in STARTERS}
    assert new == {}, "use flexkv.client"
    assert found.keys() == STARTERS, "take it off the list"


def test_a_cache_has_at_most_thirty_members() -> None:
    members = {name for name in vars(CacheClient) if not name.startswith("_")}
    assert len(members) <= MOST_MEMBERS, "merge some, or let a caller do without"


@pytest.mark.parametrize(
    ("code", "imported"),
    [
        ("from flexkv import KVCache, load_config", {"flexkv.cache"}),
        ("from flexkv.transfer.copies import Transfer", {"flexkv.transfer.copies"}),
        ("if TYPE_CHECKING:\n    import flexkv.index.pins", {"flexkv.index.pins"}),
        ("def f():\n    from flexkv import tiers", {"flexkv.tiers"}),
        ("from flexkv.client import CacheClient", None),
        ("from flexkv.cachet import A", None),
    ],
)
def test_a_reach_is_found(tmp_path: Path, code: str, imported: set[str] | None) -> None:
    file = tmp_path / "packages/flexkv/src/flexkv/engine/scheduler/a.py"
    file.parent.mkdir(parents=True)
    file.write_text(code)
    file.parent.parent.with_name("cache.py").write_text("import flexkv.index.pins")
    expected = {} if imported is None else {"flexkv.engine.scheduler.a": imported}
    assert reaches(tmp_path) == expected
