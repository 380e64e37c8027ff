# SPDX-License-Identifier: Apache-2.0
"""The shell commands on the site, and what can be said about them without running them."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "pages"
LISTED = Path(__file__).with_name("commands.toml")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELL = {"bash", "console", "sh", "shell"}
_PROMPT = "$ "
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SEPARATORS = {"&&", "||", ";", "|"}


@dataclass(frozen=True, slots=True)
class Statement:
    """A command with its arguments, as a shell reads them."""

    environment: dict[str, str]
    words: list[str]

    @property
    def program(self) -> str:
        return self.words[0] if self.words else ""

    @property
    def text(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of commands on a page.

    Attributes:
        page: its path below `pages`.
        begins: the first line that is a command, without prompt, comment and backslash. Names the
            block on its page.
        statements: in their order.
    """

    page: str
    begins: str
    statements: list[Statement]


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry of commands.toml.

    Attributes:
        page: as in `Block`.
        begins: the same.
        tests: "FILE::FUNCTION", which run what the block shows.
        unrun: why no test does; "" if one does.
    """

    page: str
    begins: str
    tests: list[str]
    unrun: str


def blocks_of(page: str, text: str) -> list[Block]:
    """All blocks of commands in the Markdown of a page."""
    found = []
    for language, body in _FENCE.findall(text):
        lines = body.splitlines()
        prompted = [line[len(_PROMPT) :] for line in lines if line.startswith(_PROMPT)]
        if prompted:
            lines = prompted
        elif language not in _SHELL:
            continue
        commands = [line for line in lines if line.strip() and not line.startswith("#")]
        begins = re.sub(r"\s+#.*|\s*\\$", "", commands[0])
        found.append(Block(page, begins, list(_statements("\n".join(commands)))))
    return found


@cache
def all_blocks() -> list[Block]:
    """The blocks of the site and of the README."""
    files = [*sorted(PAGES.rglob("*.md")), ROOT / "README.md"]
    found = []
    for file in files:
        name = "README.md" if file.parent == ROOT else str(file.relative_to(PAGES))
        found += blocks_of(name, file.read_text(encoding="utf-8"))
    return found


def all_statements(program: str) -> list[Statement]:
    """The commands of one program, wherever they are."""
    return [each for block in all_blocks() for each in block.statements if each.program == program]


def listed() -> list[Listed]:
    """The entries of commands.toml."""
    entries = tomllib.loads(LISTED.read_text(encoding="utf-8"))["block"]
    return [
        Listed(each["page"], each["begins"], each.get("tests", []), each.get("unrun", ""))
        for each in entries
    ]


def exists(test: str) -> bool:
    """Whether there is a test, or a session of nox, of that name: FILE::FUNCTION."""
    file, _, function = test.partition("::")
    if not (ROOT / file).is_file():
        return False
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    # Tests of one engine are run with others by importing them.
    imports = [node.names for node in tree.body if isinstance(node, ast.ImportFrom)]
    return function in names | {alias.name for each in imports for alias in each}


def sessions() -> set[str]:
    """Names of the sessions in the noxfile."""
    names = set()
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(call, ast.Attribute) and call.attr == "session":
                options = decorator.keywords if isinstance(decorator, ast.Call) else []
                given = [k.value.value for k in options if k.arg == "name"]  # type: ignore[attr-defined]
                names.add(given[0] if given else node.name)
    return names


def _statements(text: str) -> Iterator[Statement]:
    for line in _logical_lines(text):
        words: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        for word in [*lexer, ";"]:
            if word not in _SEPARATORS:
                words.append(word)
            elif words:
                yield _statement(words)
                words = []


def _logical_lines(text: str) -> Iterator[str]:
    """Lines of which a quote or a backslash at the end makes one."""
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += line
        try:
            shlex.split(pending, comments=True)
        except ValueError:  # an open quote
            pending += "\n"
            continue
        yield pending
        pending = ""
    if pending:
        raise ValueError(f"a quote is not closed: {pending!r}")


def _statement(words: list[str]) -> Statement:
    environment = {}
    while words and (match := _VARIABLE.fullmatch(words[0])):
        environment[match[1]] = match[2]
        words = words[1:]
    return Statement(environment, words)
