# SPDX-License-Identifier: Apache-2.0
"""The static level knows no engine: here it reads a small one, with other classes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compat_ci.matrix import Engine
from compat_ci.static import Subclass, check, subclasses
from compat_ci.wheels import Tree

ENGINE = """\
from abc import ABC, abstractmethod

class OffloadingManager(ABC):
    @abstractmethod
    def lookup(self, keys: list[bytes], request: str) -> int: ...
    def touch(self, keys: list[bytes]) -> None: ...

class OffloadingSpec(ABC):
    def __init__(self, config: dict[str, int]) -> None: ...
    @abstractmethod
    def get_manager(self) -> OffloadingManager: ...
"""
ADAPTER = """\
from toy.offload import OffloadingManager, OffloadingSpec

class Manager(OffloadingManager):
    def lookup(self, keys: list[bytes], request: str) -> int:
        return 0
    def touch(self, keys: list[bytes]) -> None: ...

class Spec(OffloadingSpec):
    def __init__(self, config: dict[str, int]) -> None:
        super().__init__(config)
    def get_manager(self) -> OffloadingManager:
        return Manager()
"""


@pytest.fixture
def toy(tmp_path: Path) -> Engine:
    for name, code in {"toy/offload.py": ENGINE, "ours/offload.py": ADAPTER}.items():
        file = tmp_path / name
        file.parent.mkdir()
        file.with_name("__init__.py").touch()
        file.write_text(code, encoding="utf-8")
    return Engine(
        name="toy",
        package="toy",
        starts="",
        adapter=tmp_path / "ours",
        uses=(),
        concerns=(),
        callers=(),
        nightly=None,
        since={"touch": "2.0"},
        accepted={},
        tests={},
        releases=(),
    )


def findings(toy: Engine, old: str = "", new: str = "", version: str = "2.1") -> list[str]:
    """What is found once the engine has `new` in place of `old`."""
    folder = toy.adapter.parent
    file = folder / "toy" / "offload.py"
    code = file.read_text(encoding="utf-8")
    assert old in code
    file.write_text(code.replace(old, new), encoding="utf-8")
    return [str(finding) for finding in check(toy, Tree(folder, version), ())]


def test_all_classes_of_the_engine_are_found(toy: Engine) -> None:
    found = list(subclasses(toy.adapter / "offload.py", toy))
    manager = ("lookup", "touch")
    assert found == [
        Subclass("ours.offload", "Manager", "toy.offload", "OffloadingManager", manager, False),
        Subclass("ours.offload", "Spec", "toy.offload", "OffloadingSpec", ("get_manager",), True),
    ]


def test_an_adapter_that_fits(toy: Engine) -> None:
    assert findings(toy) == []


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("def lookup", "def find", "Manager: Cannot instantiate `Manager`"),
        ("request: str", "request: str, group: int", "`Manager.lookup`"),
        ("config: dict[str, int]", "config: dict[str, int], rank: int", "OffloadingSpec.__init__"),
        ("class OffloadingManager", "class Manager", "`OffloadingManager` from `toy.offload`"),
    ],
)
def test_a_change_is_named(toy: Engine, old: str, new: str, name: str) -> None:
    assert any(name in finding for finding in findings(toy, old, new))


def test_a_method_that_came_later_may_be_missing_before(toy: Engine) -> None:
    old = "    def touch(self, keys: list[bytes]) -> None: ...\n"
    assert findings(toy, old, "", version="1.9") == []
    said = findings(toy, version="2.0")
    assert said == [
        "ours.offload.Manager: Class `OffloadingManager` has no class attribute `touch`"
    ]


def test_a_module_that_came_later_may_be_missing_before(toy: Engine) -> None:
    file = toy.adapter / "offload.py"
    code = file.read_text(encoding="utf-8")
    file.write_text(
        code + "\ndef medium() -> object:\n    import toy.media\n    return toy.media\n"
    )
    later = replace(toy, since={"touch": "2.0", "toy.media": "2.0"})
    assert findings(later, version="1.9") == []
    (finding,) = findings(later, version="2.0")
    assert "Cannot find module `toy.media`" in finding


def test_a_package_for_newer_versions_is_not_read_before(toy: Engine) -> None:
    folder = toy.adapter / "newer"
    folder.mkdir()
    (folder / "__init__.py").write_text("from toy.offload import OffloadingWorker\n")
    (toy.adapter / "newer_still.py").write_text("from toy.offload import OffloadingLink\n")
    since = replace(toy, since={"touch": "2.0", "ours.newer": "2.0"})
    (before,) = findings(since, version="1.9")
    assert "`OffloadingLink`" in before
    assert any("`OffloadingWorker`" in finding for finding in findings(since, version="2.0"))
