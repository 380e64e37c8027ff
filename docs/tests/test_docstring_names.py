# SPDX-License-Identifier: Apache-2.0
"""A docstring lists only arguments and attributes that are there, also after a rename."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("packages/*/src/**/*.py", "kernels/python/**/*.py", "integration/**/*.py")

_SECTION = re.compile(r"^(Args|Attributes):\n((?: {4}.*\n|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*):", re.MULTILINE)


def _listed(node: ast.FunctionDef | ast.ClassDef) -> dict[str, set[str]]:
    """The names in the sections of a docstring."""
    text = (ast.get_docstring(node) or "") + "\n"
    return {
        section: {name for entry in _ENTRY.findall(body) for name in entry.split(", ")}
        for section, body in _SECTION.findall(text)
    }


def _arguments(function: ast.FunctionDef) -> set[str]:
    every = ast.walk(function.args)
    return {node.arg for node in every if isinstance(node, ast.arg)}


def _members(node: ast.ClassDef) -> set[str]:
    """Names that a class defines, itself or in its methods."""
    found = set()
    for part in ast.walk(node):
        match part:
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.FunctionDef(name=name):
                found.add(name)
    return found


def unknown_names(tree: ast.Module) -> Iterator[str]:
    """Names in docstrings for which there is no argument or attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield from _listed(node).get("Args", set()) - _arguments(node)
        elif isinstance(node, ast.ClassDef):
            listed, members = _listed(node), _members(node)
            makers = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            given = set().union(*map(_arguments, makers))
            yield from listed.get("Attributes", set()) - members
            yield from listed.get("Args", set()) - members - given


@pytest.mark.parametrize("pattern", CODE)
def test_docstrings_list_what_is_there(pattern: str) -> None:
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in ROOT.glob(pattern)
        for name in unknown_names(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert unknown == set()


def test_a_name_that_is_not_there_is_found() -> None:
    code = '''
class One:
    """One.

    Attributes:
        here, gone: of it.
            more: of the text.
    """

    here: int

    def act(self, new: int) -> None:
        """Act.

        Args:
            old: how: often.
        """
'''
    assert sorted(unknown_names(ast.parse(code))) == ["gone", "old"]
