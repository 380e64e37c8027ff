# SPDX-License-Identifier: Apache-2.0
"""The static level: an adapter against the Python files of an engine, neither of them run.

A type checker (pyrefly) reads the adapter with the engine's files in reach. It tells of every name
that is not there to import, every attribute that is not there to read, every call that a signature
does not take, and every override that does not take what the base class's does. What else an
engine expects of a subclass is asked of the same checker by a generated file, see `_Probe`. Nothing
here knows a class or a method of any engine: what is checked follows from the adapter's code.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from compat_ci.matrix import Engine
from compat_ci.wheels import Tree

_CONFIG = """\
python-version = "3.12"
skip-interpreter-query = true
disable-search-path-heuristics = true
disable-project-excludes-heuristics = true
"""
_NOT_THERE = {"missing-import", "missing-module-attribute"}
_PROBE_NAME = "compat_ci_probe.py"
_PROBE_HEAD = """\
from collections.abc import Callable
from typing import Any

def takes_the_same[**P](theirs: Callable[P, object], ours: Callable[P, object]) -> None: ...
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that does not fit.

    Attributes:
        place: file and line, or the class that it is about.
        text: what it is, with its name.
    """

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


@dataclass(frozen=True, slots=True)
class Subclass:
    """A class of the adapter with a base class of the engine.

    Attributes:
        module, name: where it is.
        base_module, base: what it names as its base.
        methods: public ones that it defines.
        makes_itself: whether it has a constructor of its own, which the engine calls as the base's.
    """

    module: str
    name: str
    base_module: str
    base: str
    methods: tuple[str, ...]
    makes_itself: bool


def check(engine: Engine, tree: Tree, accepted: Collection[str]) -> list[Finding]:
    """All that does not fit between the adapter and the engine's files in `tree`.

    Args:
        engine: with the adapter.
        tree: of one version.
        accepted: parts of the text of findings to leave out.

    Raises:
        OSError: files of the engine that call the adapter are not there.
        RuntimeError: the type checker did not do its work.
    """
    files = [
        file for file in sorted(engine.adapter.rglob("*.py")) if _serves(file, engine, tree.version)
    ]
    callers = [tree.path / name for name in engine.callers]
    for caller in callers:
        caller.stat()
    newer = [
        text.format(name=name)
        for name, since in engine.since.items()
        if Version(since) > Version(tree.version)
        for text in _ABSENT
    ]
    probe = _probe([found for file in files for found in subclasses(file, engine)], engine, tree)
    findings = [
        finding
        for error in _type_errors([*files, *callers], probe, [tree.path, *_folders(engine)])
        if (finding := _finding(error, probe, engine, tree)) is not None
        and not any(part in finding.text for part in [*accepted, *newer])
    ]
    return list(dict.fromkeys(findings))


_ABSENT = (
    "Cannot find module `{name}`",
    "No attribute `{name}` in module",
    "Could not import `{name}` from",
    "has no attribute `{name}`",
)
"""What the type checker says of a name that a release has not got."""


def subclasses(file: Path, engine: Engine) -> Iterator[Subclass]:
    """The classes in a file of the adapter that have a base class of the engine."""
    module = ast.parse(file.read_text(encoding="utf-8"))
    imported = {
        name: (source, original)
        for source, original, name in _imported(module)
        if source.partition(".")[0] == engine.package
    }
    path = _module_of(file, engine)
    for node in ast.walk(module):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
        public = tuple(method for method in methods if not method.startswith("_"))
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in imported:
                yield Subclass(path, node.name, *imported[base.id], public, "__init__" in methods)


def _module_of(file: Path, engine: Engine) -> str:
    inside = file.relative_to(engine.adapter.parent).with_suffix("")
    return ".".join(part for part in inside.parts if part != "__init__")


def _serves(file: Path, engine: Engine, version: str) -> bool:
    """Whether a file of the adapter is for this version of the engine: those of a package of its
    own may be for newer ones only."""
    module = _module_of(file, engine)
    return not any(
        f"{module}.".startswith(f"{name}.") and Version(since) > Version(version)
        for name, since in engine.since.items()
    )


def _imported(module: ast.Module) -> Iterator[tuple[str, str, str]]:
    """What a file imports by name: from where, as what it is known there, and here."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield node.module, alias.name, alias.asname or alias.name


@dataclass(frozen=True, slots=True)
class _Probe:
    """Code whose type errors are what a checker does not say of a class by itself: abstract
    methods that it lacks, overridden methods that its base has not got (any more), and a
    constructor that does not take what the base's takes.

    Attributes:
        lines: of the code.
        places: for each line what an error in it is about.
    """

    lines: list[str]
    places: list[str]


def _probe(classes: Iterable[Subclass], engine: Engine, tree: Tree) -> _Probe:
    lines = _PROBE_HEAD.splitlines()
    places = [""] * len(lines)
    for i, found in enumerate(classes):
        lines += [
            f"from {found.module} import {found.name} as Ours{i}",
            f"from {found.base_module} import {found.base} as Theirs{i}",
            f"def make{i}(anything: Any) -> None:",
            f"    Ours{i}(*anything, **anything)",
        ]
        if found.makes_itself:
            lines.append(f"takes_the_same(Theirs{i}, Ours{i})")
        lines += [
            f"Theirs{i}.{method}"
            for method in found.methods
            if Version(engine.since.get(method, "0")) <= Version(tree.version)
        ]
        places += [f"{found.module}.{found.name}"] * (len(lines) - len(places))
    return _Probe(lines, places)


def _type_errors(
    files: Iterable[Path], probe: _Probe, folders: Iterable[Path]
) -> list[dict[str, Any]]:
    """What the type checker says, with modules from `folders` and nowhere else."""
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch, "pyrefly.toml")
        config.write_text(
            f"search-path = {json.dumps([str(folder) for folder in folders])}\n" + _CONFIG,
            encoding="utf-8",
        )
        code = Path(scratch, _PROBE_NAME)
        code.write_text("\n".join([*probe.lines, ""]), encoding="utf-8")
        command = [sys.executable, "-m", "pyrefly", "check", "--config", str(config)]
        command += ["--output-format", "json", *map(str, files), str(code)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in {0, 1} or not done.stdout:
        raise RuntimeError(f"pyrefly failed with {done.returncode}: {done.stderr}")
    errors: list[dict[str, Any]] = json.loads(done.stdout)["errors"]
    return [error for error in errors if error["severity"] == "error"]


def _finding(error: Mapping[str, Any], probe: _Probe, engine: Engine, tree: Tree) -> Finding | None:
    """What a type error says of the two, None if it is about neither."""
    path, line, kind = Path(error["path"]).resolve(), error["line"], error["name"]
    text = " ".join(error["description"].split())
    if kind == "missing-import":
        text = error["concise_description"]  # without the folders
        if not _is_known(text, engine):
            return None  # torch and the like, which need not be here
    if kind == "missing-module-attribute":
        text += _moved_to(text, engine, tree)
    if path.name == _PROBE_NAME:
        # The adapter's own file has an import that fails, too.
        return None if kind in _NOT_THERE else Finding(probe.places[line - 1], text)
    if path.is_relative_to(engine.adapter):
        return Finding(f"{path.relative_to(engine.adapter)}:{line}", text)
    # What else is wrong in the engine's own file is not about us.
    ours = [*_called(path, engine), f"{engine.adapter.name}."]  # also what our class inherits
    about_us = any(f"`{name}" in text or f".{name}" in text for name in ours)
    return Finding(f"{path.name}:{line}", text) if about_us else None


def _folders(engine: Engine) -> list[Path]:
    return [*engine.uses, engine.adapter.parent]


def _is_known(text: str, engine: Engine) -> bool:
    """Whether the module that cannot be found is the engine's, or ours."""
    match = re.search(r"`(\w+)", text)
    return match is not None and (match[1] == engine.package or _is_ours(match[1], engine))


def _is_ours(module: str, engine: Engine) -> bool:
    package = module.partition(".")[0]
    return any((folder / package).is_dir() for folder in _folders(engine))


def _called(caller: Path, engine: Engine) -> list[str]:
    """What a file of the engine imports of ours."""
    module = ast.parse(caller.read_text(encoding="utf-8"))
    return [name for source, name, _ in _imported(module) if _is_ours(source, engine)]


def _moved_to(text: str, engine: Engine, tree: Tree) -> str:
    """Where the name that cannot be imported is defined now."""
    match = re.match(r"Could not import `(\w+)`", text)
    if match is None:
        return ""
    definition = re.compile(rf"^(class|def|async def) {match[1]}\b|^{match[1]} *[:=]", re.MULTILINE)
    found = [
        str(file.relative_to(tree.path))
        for file in sorted((tree.path / engine.package).rglob("*.py"))
        if definition.search(file.read_text(encoding="utf-8"))
    ]
    return f"; it is defined in {', '.join(found)}" if found else "; it is defined nowhere"
