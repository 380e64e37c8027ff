# SPDX-License-Identifier: Apache-2.0
"""Names of an engine that its adapter must know, such as settings and calls that change weights.

An adapter acts on all but those that it knows to be harmless. A name that nobody has looked at is
therefore safe, but may cost hits for nothing. It is a finding here.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from compat_ci.matrix import Engine
from compat_ci.wheels import Tree

KNOWN = Path(__file__).parent.parent / "known.toml"


@dataclass(frozen=True, slots=True)
class Names:
    """A place of an engine whose names an adapter must know.

    Attributes:
        files: of the engine, relative to where its package lies; a pattern.
        inside: a class, with its fields; a class and `()`, with its public methods; or a function,
            with the names that it chooses by: first entries of pairs, and texts that it compares
            with; or a variable, with the keys of its dict. All classes if empty.
        adapter: file of the adapter whose texts are names that it knows; empty if none is.
        others: other known names.
        since: release from which on the adapter must know them.
    """

    files: str
    inside: str
    adapter: str
    others: frozenset[str]
    since: Version

    def unknown(self, engine: Engine, tree: Tree) -> Iterator[tuple[str, str]]:
        """Files and names in `tree` that the adapter does not know.

        Raises:
            LookupError: `tree` has no such place.
        """
        known = self.others | (_texts(engine.adapter / self.adapter) if self.adapter else set())
        inside = self.inside.removesuffix("()")
        places = [
            (file, node)
            for file in sorted(tree.path.glob(self.files))
            for node in ast.walk(ast.parse(file.read_text("utf-8")))
            if (_name_of(node) == inside if inside else isinstance(node, ast.ClassDef))
        ]
        if not places:
            raise LookupError(f"{tree.path} has no {self.inside} in {self.files}")
        for file, node in places:
            for name in sorted(_names(node, calls=inside != self.inside) - known):
                yield f"{file.relative_to(tree.path)}: {_name_of(node)}", name


def load(package: str, path: Path = KNOWN) -> list[Names]:
    """The places of a package. KeyError or ValueError if the file is malformed."""
    with path.open("rb") as file:
        sections = tomllib.load(file)
    return [
        Names(
            each["files"],
            each.get("inside", ""),
            each.get("adapter", ""),
            frozenset(each.get("others", ())),
            Version(each.get("since", "0")),
        )
        for each in sections.get(package, ())
    ]


def unknown_names(engine: Engine, tree: Tree) -> list[str]:
    """What the adapter does not know in `tree`, as findings of the static level.

    Raises:
        LookupError: `tree` lacks a place that it should have.
    """
    return [
        f"{place}: `{name}` is new; look at it, and name it in {KNOWN.name} or in the adapter"
        for names in load(engine.package)
        if names.since <= Version(tree.version)
        for place, name in names.unknown(engine, tree)
    ]


def _texts(file: Path) -> set[str]:
    """All words of the texts in a file, but for comments and docstrings."""
    tree = ast.parse(file.read_text("utf-8"))
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {
        word
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node not in docstrings
        for word in node.value.split()
    }


def _name_of(node: ast.AST) -> str | None:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return name
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict()):
            return name
    return None


def _names(node: ast.AST, *, calls: bool) -> set[str]:
    if isinstance(node, ast.ClassDef) and calls:
        return {
            item.name
            for item in node.body
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            and not item.name.startswith("_")
        }
    if isinstance(node, ast.ClassDef):
        return {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and "ClassVar" not in ast.unparse(item.annotation)
        }
    if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
        return {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    found: set[str] = set()
    for part in ast.walk(node):
        match part:
            case ast.Tuple(elts=[ast.Name(id=first), _]):
                found.add(first)
            case ast.Compare(comparators=[ast.Constant(value=str(text))]):
                found.add(text)
    return found
