# SPDX-License-Identifier: Apache-2.0
"""What is private in vLLM is touched in one file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import flexkv_vllm
from flexkv_vllm.compat import patches

SOURCE = Path(flexkv_vllm.__file__).parent
OWN = {"self", "cls"}


def private_touches(file: Path) -> list[str]:
    """Private attributes of objects but the own one, read or written or asked for by name."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute(value=ast.Name(id=name)) if name in OWN:
                continue
            case ast.Attribute(attr=attribute):
                touched = attribute
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                touched = name
            case _:
                continue
        if touched.startswith("_") and not touched.startswith("__"):
            found.append(touched)
    return found


def test_private_parts_of_vllm_are_touched_in_one_file() -> None:
    touches = {
        str(file.relative_to(SOURCE)): private_touches(file) for file in SOURCE.rglob("*.py")
    }
    assert touches.pop("compat/patches.py")
    assert {file: found for file, found in touches.items() if found} == {}


def test_a_check_is_called_once_however_often_the_plugin_is_loaded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    found = object()
    monkeypatch.setattr(
        patches.KVConnectorFactory, "get_connector_class", staticmethod(lambda config: found)
    )
    asked: list[object] = []
    for _ in range(2):
        patches.call_when_choosing(asked.append)
    config = object()
    assert patches.KVConnectorFactory.get_connector_class(config) is found  # type: ignore[arg-type]
    assert asked == [config]


def test_the_design_page_names_each_replaced_method() -> None:
    tree = ast.parse((SOURCE / "compat" / "patches.py").read_text())
    replaced = {*patches._PASSED_ON}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="connector"), attr=name)]):
                replaced.add(name)
            case ast.Call(func=ast.Name(id="_replaces"), args=[_, ast.Constant(value=str(name))]):
                replaced.add(name)
    page = Path(flexkv_vllm.__file__).parents[4] / "docs" / "pages" / "design" / "index.md"
    section = page.read_text().partition("## Methods of vLLM that FlexKV replaces")[2]
    rows = [line.split("|") for line in section.partition("\n## ")[0].splitlines() if "`" in line]
    named = {name for row in rows if len(row) > 3 for name in re.findall(r"`(\w+)`", row[2])}
    assert named == replaced
