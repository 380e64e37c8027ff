# SPDX-License-Identifier: Apache-2.0
"""Makes mutants of changed lines of Python, and says which of them no test noticed."""

from __future__ import annotations

import ast
import copy
import difflib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from integration.lanes.change import base_of_change
from integration.lanes.importers import SOURCES
from integration.lanes.quick import ConcernedTests
from mutants.entries import ROOT, Mutant
from mutants.verdicts import Result, Verdict

AREA = "changed"

MOST = 400
"""Mutants of a run, spread over the change. Not tuned: at 5 s each they take half an hour."""

_ENGINE_TESTS = ("integration/tests/", "integration/demo/")
_LOGGING = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log"})
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    one: other
    for pair in (
        (ast.Lt, ast.LtE),
        (ast.Gt, ast.GtE),
        (ast.Eq, ast.NotEq),
        (ast.Is, ast.IsNot),
        (ast.In, ast.NotIn),
        (ast.And, ast.Or),
        (ast.Add, ast.Sub),
    )
    for one, other in (pair, pair[::-1])
}


def make(base: str | None = None, root: Path = ROOT) -> list[Mutant]:
    """At most `MOST` mutants of the lines that differ from the commit `base` (default: where the
    work left the main branch), those of a file in order.

    Raises:
        subprocess.CalledProcessError: git does not know `base`.
    """
    tests = ConcernedTests(root)
    made = []
    for file, lines in changed_lines(base or base_of_change(root), root).items():
        chosen = tuple(test for test in tests.of(file) if not test.startswith(_ENGINE_TESTS))
        text = root.joinpath(file).read_text(encoding="utf-8")
        for line, changed in faults_of(text, lines):
            made.append(Mutant(AREA, f"line_{line}", file, text, changed, chosen, line=line))
    step = max(1, -(-len(made) // MOST))
    return made[::step]


def changed_lines(base: str, root: Path = ROOT) -> dict[str, set[int]]:
    """The sources of our packages that differ from `base`, committed or not, and the numbers of
    their lines that do."""
    command = ["git", "diff", "--unified=0", "--no-color", "--no-prefix", "--diff-filter=d", base]
    diff = subprocess.run(
        [*command, "--", *(f"{source}/*.py" for source in SOURCES)],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found: dict[str, set[int]] = {}
    file = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ ")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            found.setdefault(file, set()).update(range(first, first + count))
    return found


def faults_of(text: str, lines: set[int]) -> Iterator[tuple[int, str]]:
    """Faults in `lines` of a source: the line of each, and the source with it."""
    for node, other in _faults(ast.parse(text)):
        if node.lineno in lines:
            yield node.lineno, _replaced(text, node, other)


def report(results: list[Result]) -> str:
    """What no test noticed: file and line, and the difference."""
    parts = []
    for result in results:
        if result.verdict is Verdict.SURVIVED:
            mutant = result.mutant
            texts = (mutant.find.splitlines(), mutant.replace.splitlines())
            diff = list(difflib.unified_diff(*texts, n=0, lineterm=""))[3:]
            why = "" if mutant.tests else ": no test concerns the file"
            parts.append("\n".join([f"{mutant.file}:{mutant.line}{why}", *diff]))
    return "\n\n".join(parts)


def _faults(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | ast.stmt]]:
    """Nodes below `node`, and what replaces each."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "type_params"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.expr | ast.stmt):
                yield from ((child, other) for other in _others(child))
            if not _is_log(child):
                yield from _faults(child)


def _others(node: ast.expr | ast.stmt) -> Iterator[ast.expr | ast.stmt]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _SWAPPED:
            yield _with(node, ops=[_SWAPPED[type(op)]()])
        case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in _SWAPPED:
            yield _with(node, op=_SWAPPED[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as number):
            yield ast.Constant(number + 1)
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield _with(node, value=ast.Constant(None))
        case ast.If(test=ast.Name() | ast.Attribute() | ast.Call() as test):
            yield _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.AugAssign() if not _is_log(node):
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()


def _with(node: ast.AST, **fields: object) -> ast.expr | ast.stmt:
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    assert isinstance(made, ast.expr | ast.stmt)
    return made


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_log(node: ast.AST) -> bool:
    """Whether the statement writes to the log: its words are no rule."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
            return name in _LOGGING
    return False


def _replaced(text: str, node: ast.expr | ast.stmt, other: ast.expr | ast.stmt) -> str:
    """The text with `other` at the place of `node`; offsets of ast are bytes of UTF-8."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = text.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    written = ast.unparse(other)
    # An expression binds as strongly as the one that it replaces.
    new = f"({written})" if isinstance(other, ast.expr) else written
    data = text.encode()
    return (data[:begin] + new.encode() + data[end:]).decode()
