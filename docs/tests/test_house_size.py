# SPDX-License-Identifier: Apache-2.0
"""The house does not grow unseen: `folder_lines.toml` has the lines of each folder."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("flexkv/src/flexkv", "flexkv-vllm/src/flexkv_vllm", "flexkv-sglang/src/flexkv_sglang")
TABLE = Path(__file__).with_name("folder_lines.toml")
SLACK = 0.02
"""The part by which a folder may differ from its number."""

CALLBACKS = 62
"""Callables that our constructors take. It may only fall: a caller that a class calls back knows
more of it than a value would."""


def folder_lines(root: Path) -> Counter[str]:
    """Lines of Python by folder; a file beside the folders counts to its package."""
    lines: Counter[str] = Counter()
    for package in PACKAGES:
        top = root / "packages" / package
        for path in top.rglob("*.py"):
            folder = (top.name, *path.relative_to(top).parts[:-1][:2])
            lines["/".join(folder)] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def differing(lines: Mapping[str, int], table: Mapping[str, Mapping[str, object]]) -> list[str]:
    """The folders whose lines are not those of the table."""
    found = []
    for folder in sorted({*lines, *table}):
        known = table.get(folder, {}).get("lines", 0)
        assert isinstance(known, int)
        if abs(lines.get(folder, 0) - known) > SLACK * known:
            found.append(f"{folder}: {lines.get(folder, 0)} lines, the table has {known}")
    return found


def callbacks(text: str) -> int:
    """Parameters of `__init__`, and fields of dataclasses, that are functions."""
    count = 0
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        types = []
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                types += [arg.annotation for arg in [*part.args.args, *part.args.kwonlyargs]]
            elif isinstance(part, ast.AnnAssign) and node.decorator_list:
                types.append(part.annotation)
        count += sum("Callable[" in ast.unparse(given) for given in types if given is not None)
    return count


def test_no_folder_grows_unseen() -> None:
    """A folder that grows says in the table what for; one that shrinks keeps its new number."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    assert differing(folder_lines(ROOT), table) == []
    assert [folder for folder, row in table.items() if not row.get("for")] == []


@pytest.mark.parametrize(
    ("lines", "is_found"), [(100, False), (102, False), (103, True), (97, True), (0, True)]
)
def test_a_folder_that_differs_is_found(tmp_path: Path, lines: int, is_found: bool) -> None:
    file = tmp_path / "packages/flexkv/src/flexkv/tiers/disk/parts/a.py"
    file.parent.mkdir(parents=True)
    file.write_text("\n" * lines)
    assert (
        bool(differing(folder_lines(tmp_path), {"flexkv/tiers/disk": {"lines": 100}})) is is_found
    )


def test_constructors_take_no_more_callbacks() -> None:
    files = [path for package in PACKAGES for path in (ROOT / "packages" / package).rglob("*.py")]
    assert sum(callbacks(path.read_text(encoding="utf-8")) for path in files) <= CALLBACKS


def test_a_callback_is_found() -> None:
    text = """
class A:
    def __init__(self, call: Callable[[], None], *, other: Callable[[int], int] | None): ...
    def call(self, call: Callable[[], None]): ...
@dataclass
class B:
    call: Callable[[], None]
    name: str
    default: Callable[[], None] = print
"""
    assert callbacks(text) == 4
