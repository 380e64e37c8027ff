# SPDX-License-Identifier: Apache-2.0
"""The order of the house holds, and the check of it can fail."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from docs import import_graph
from docs.import_graph import draw, faults, read_imports, room_of

MOST_IMPORTS = 12
MANY_IMPORTS = {"flexkv_sglang.side": 15}
"""The modules that import more modules of ours, and how many. The list may only shrink."""


@functools.cache
def _read() -> dict[str, set[str]]:
    return read_imports()


@pytest.fixture
def imports() -> dict[str, set[str]]:
    """Each of our modules with those that it imports; the test's own."""
    return {module: set(imported) for module, imported in _read().items()}


def test_every_import_goes_down_and_no_files_form_a_cycle(imports: dict[str, set[str]]) -> None:
    assert faults(imports) == []


def test_a_module_of_an_adapter_imports_twelve_of_ours_at_most(
    imports: dict[str, set[str]],
) -> None:
    adapters = ("flexkv.engine.", "flexkv_sglang.", "flexkv_vllm.")
    many = {
        module: len(imported)
        for module, imported in imports.items()
        if module.startswith(adapters) and len(imported) > MOST_IMPORTS
    }
    assert many.keys() == MANY_IMPORTS.keys(), "split a new one; remove one that is left no more"
    assert all(number <= MANY_IMPORTS[module] for module, number in many.items()), many


def test_the_picture_is_that_of_the_code(imports: dict[str, set[str]]) -> None:
    assert import_graph.PICTURE.read_text() == draw(imports), "run docs/import_graph.py"


def test_all_modules_of_all_packages_are_read(imports: dict[str, set[str]]) -> None:
    assert "flexkv.tiers.disk.disk_store" in imports["flexkv.tiers.disk"]
    assert "flexkv.engine.scheduler.engine" in imports["flexkv.engine.scheduler.request"]
    assert {module.partition(".")[0] for module in imports} == {
        "flexkv",
        "flexkv_vllm",
        "flexkv_sglang",
        "flexkv_kernels",
    }


@pytest.mark.parametrize(
    ("module", "imported", "said"),
    [
        (
            "flexkv.index.pins",
            "flexkv.cache",
            "flexkv.index.pins (index) imports flexkv.cache (cache)",
        ),
        (
            "flexkv.engine.choice.cost",
            "flexkv_vllm.pages",
            "(engine/choice) imports flexkv_vllm.pages",
        ),
        ("flexkv.tiers.base", "flexkv.tiers.disk.tier", "(tiers) imports flexkv.tiers.disk.tier"),
        ("flexkv.host.arena", "flexkv.tiers.job", "(host) imports flexkv.tiers.job (tiers)"),
        (
            "flexkv.eviction.policy",
            "flexkv.layout.kv_layout",
            "(eviction) imports flexkv.layout.kv_layout",
        ),
        (
            "flexkv.types.errors",
            "flexkv.system.numa",
            "(types) imports flexkv.system.numa (system)",
        ),
    ],
)
def test_an_import_upwards_or_next_door_is_found(
    imports: dict[str, set[str]], module: str, imported: str, said: str
) -> None:
    imports[module].add(imported)
    assert any(said in fault for fault in faults(imports))


def test_a_cycle_of_files_in_one_room_is_found(imports: dict[str, set[str]]) -> None:
    imports["flexkv.tiers.disk.files"].add("flexkv.tiers.disk.disk_store")
    assert any(fault.startswith("cycle of files") for fault in faults(imports))


@pytest.mark.parametrize(
    ("own", "code", "found"),
    [
        ("flexkv_vllm.a", "importlib.import_module('flexkv_vllm.connector')", True),
        ("flexkv_vllm.a", "NAME = 'flexkv_vllm.connector'\nimport_module(NAME)", True),
        ("flexkv_vllm.a", "__import__('flexkv_vllm.connector')", True),
        ("flexkv_vllm.a", "register('flexkv_vllm.connector')", False),
        ("flexkv_vllm.a", "import_module('flexkv_kernels.hazard')", True),
        ("flexkv.eviction.a", "import_module('flexkv_kernels.hazard')", False),
    ],
)
def test_an_import_by_name_is_seen(tmp_path: Path, own: str, code: str, found: bool) -> None:
    file = tmp_path / "module.py"
    file.write_text(code)
    ours = {"flexkv_vllm.connector": file, "flexkv_kernels.hazard": file}
    assert bool(list(import_graph._imports(file, own, ours))) == found


def test_a_new_module_of_the_core_needs_a_room() -> None:
    assert room_of("flexkv.tiers.mooncake.client")[1].name == "tiers"
    with pytest.raises(LookupError, match=r"flexkv\.new has no room"):
        room_of("flexkv.new")
