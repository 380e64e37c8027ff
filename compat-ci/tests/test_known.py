# SPDX-License-Identifier: Apache-2.0
"""A setting, a call or a request of an engine that nobody has looked at has a finding."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from compat_ci import matrix
from compat_ci.known import KNOWN, Names, load, unknown_names
from compat_ci.wheels import Tree
from integration.sglang import environment


def installed(package: str) -> Tree:
    """The installed engine; SGLang has an environment of its own."""
    if package == "sglang":
        try:
            python = environment.python()
        except environment.EnvironmentMissingError:
            if environment.may_be_missing():
                pytest.skip("SGLang is not installed")
            raise
        (folder,) = python.parents[1].glob("lib/python3*/site-packages")
        (info,) = folder.glob("sglang-[0-9]*.dist-info")
        return Tree(folder, info.name.removesuffix(".dist-info").rpartition("-")[2])
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    name = metadata.packages_distributions()[package][0]
    return Tree(Path(found.origin).parents[1], metadata.version(name))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_all_names_of_the_installed_engine_are_known(engine: str) -> None:
    assert unknown_names(matrix.load()[engine], installed(engine)) == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_each_known_name_is_needed(engine: str) -> None:
    """Some place of the engine has a name that only this list knows."""
    tree = installed(engine)
    for names in load(engine):
        if names.since <= Version(tree.version) and names.others:
            nothing = Names(names.files, names.inside, names.adapter, frozenset(), names.since)
            found = {name for _, name in nothing.unknown(matrix.load()[engine], tree)}
            assert found & names.others, names


CODE = """
class Settings:
    name: str
    fallback: ClassVar[int] = 1
    def digest(self): ...

class Calls:
    def write_weights(self): ...
    async def load(self): ...
    def _own(self): ...

def dispatch(self, action):
    self.table = [(LoadReq, self.load), (StopReq, self.stop)]
    if action == "reset": ...
    elif action != "look": ...

variables: dict[str, object] = {"PORT": 1, "BACKEND": lambda: 2}
"""


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("Settings", {"name"}),
        ("Calls()", {"write_weights", "load"}),
        ("dispatch", {"LoadReq", "StopReq", "reset", "look"}),
        ("variables", {"PORT", "BACKEND"}),
        ("", {"name"}),
    ],
)
def test_names_are_found_by_what_has_them(tmp_path: Path, inside: str, expected: set[str]) -> None:
    (tmp_path / "engine.py").write_text(CODE)
    engine, tree = matrix.load()["vllm"], Tree(tmp_path, "1.0")
    for known in sorted(expected):
        names = Names("*.py", inside, "", frozenset({known}), Version("0"))
        assert {name for _, name in names.unknown(engine, tree)} == expected - {known}


def test_a_place_that_is_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(CODE)
    names = Names("*.py", "Gone", "", frozenset(), Version("0"))
    with pytest.raises(LookupError, match="no Gone in"):
        list(names.unknown(matrix.load()["vllm"], Tree(tmp_path, "1.0")))


def test_texts_of_the_adapter_are_known_names(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("class Settings:\n    weights: str\n    unheard_of: str\n")
    names = Names("*.py", "", "weights.py", frozenset(), Version("0"))
    engine = matrix.load()["vllm"]
    assert "weights" in (engine.adapter / "weights.py").read_text()
    found = list(names.unknown(engine, Tree(tmp_path, "1.0")))
    assert ("engine.py: Settings", "unheard_of") in found


def test_a_new_name_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = installed("vllm")
    place = Names("vllm/v1/engine/core.py", "EngineCore()", "", frozenset({"step"}), Version("0"))
    monkeypatch.setattr("compat_ci.known.load", lambda engine: [place])
    said = unknown_names(matrix.load()["vllm"], tree)
    assert any("EngineCore: `add_lora` is new" in each and KNOWN.name in each for each in said)
    assert not any("`step` " in each for each in said)
