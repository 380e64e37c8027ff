# SPDX-License-Identifier: Apache-2.0
"""The lists of mutants: what an entry says, and what is wrong with one."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "mutants"

_TEXTS = ("name", "file", "find", "replace")
_KEYS = {*_TEXTS, "tests"}
_NAME = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: `find` becomes `replace` in `file`, and one of `tests` must fail.

    area: the list's name without `.toml`. file: path from the root. tests: arguments of pytest, as
    paths from the root. line: where a generated fault is, whose `find` and `replace` are whole
    files; 0 for all others.
    """

    area: str
    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    line: int = 0

    def apply(self, text: str) -> str:
        """The text of `file` with the fault; ValueError unless `find` occurs exactly once."""
        if (times := text.count(self.find)) != 1:
            raise ValueError(f"`find` occurs {times} times in {self.file}; it must occur once")
        return text.replace(self.find, self.replace)


def load(folder: Path = LISTS) -> list[Mutant]:
    """All mutants of the lists in `folder`; ValueError if an entry is not of the format."""
    return [
        _mutant(path.stem, number, entry)
        for path in sorted(folder.glob("*.toml"))
        for number, entry in enumerate(_entries(path), start=1)
    ]


def choose(mutants: Sequence[Mutant], areas: Sequence[str], names: Sequence[str]) -> list[Mutant]:
    """Those of `areas` (all if empty) whose name fits one of the patterns `names` (all if empty).

    Raises ValueError for an area or a pattern that fits none.
    """
    known = sorted({mutant.area for mutant in mutants})
    for area in areas:
        if area not in known:
            raise ValueError(f"area {area!r}; allowed: {', '.join(known)}")
    chosen = [mutant for mutant in mutants if not areas or mutant.area in areas]
    for name in names:
        if not any(fnmatchcase(mutant.name, name) for mutant in chosen):
            raise ValueError(f"no mutant's name fits {name!r}; `--list` prints the names")
    return [
        mutant
        for mutant in chosen
        if not names or any(fnmatchcase(mutant.name, name) for name in names)
    ]


def faults(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """What no longer fits the tree in `root`, one line for each fault."""
    times = Counter(mutant.name for mutant in mutants)
    found = [
        f"{name}: {count} mutants have this name" for name, count in times.items() if count > 1
    ]
    texts: dict[str, str | None] = {}
    for mutant in mutants:
        for problem in _faults_of(mutant, root, texts):
            found.append(f"{mutant.area}.toml, {mutant.name}: {problem}")
    return found


def _entries(path: Path) -> list[dict[str, object]]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path.name}: {error}") from error
    entries = table.pop("mutant", None)
    if table or not isinstance(entries, list):
        raise ValueError(f"{path.name}: a list has [[mutant]] tables and nothing else")
    return entries


def _mutant(area: str, number: int, entry: dict[str, object]) -> Mutant:
    where = f"{area}.toml, mutant {number}"
    unknown = sorted(entry.keys() - _KEYS)
    missing = sorted(_KEYS - entry.keys())
    if unknown or missing:
        problem = f"unknown keys {unknown}" if unknown else f"missing keys {missing}"
        raise ValueError(f"{where}: {problem}")
    texts = {key: entry[key] for key in _TEXTS}
    tests = entry["tests"]
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise ValueError(f"{where}: `tests` must be an array of strings")
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"{where}: {', '.join(texts)} must be strings")
    name, file, find, replace = (str(texts[key]) for key in _TEXTS)
    return Mutant(area, name, file, find, replace, tuple(tests))


def _faults_of(mutant: Mutant, root: Path, texts: dict[str, str | None]) -> Iterable[str]:
    if not _NAME.fullmatch(mutant.name):
        yield "a name has lower-case letters, digits and underscores only"
    if mutant.find == mutant.replace:
        yield "`find` and `replace` are the same"
    source = _text(root, mutant.file, texts)
    if source is None:
        yield f"there is no {mutant.file}"
    else:
        try:
            mutant.apply(source)
        except ValueError as error:
            yield str(error)
    if not mutant.tests:
        yield "`tests` is empty"
    for test in mutant.tests:
        path, *nodes = test.split("::")
        if (root / path).is_dir() and not nodes:
            continue
        tested = _text(root, path, texts)
        if tested is None:
            yield f"there is no {path}"
        elif missing := [node for node in nodes if not _defines(tested, node)]:
            yield f"{path} does not define {' or '.join(missing)}"


def _text(root: Path, path: str, texts: dict[str, str | None]) -> str | None:
    """The text of a file below `root`, None if there is no such file. `texts` keeps it."""
    if path not in texts:
        file = root / path
        texts[path] = file.read_text(encoding="utf-8") if file.is_file() else None
    return texts[path]


def _defines(text: str, node: str) -> bool:
    name = re.escape(node.partition("[")[0])
    return re.search(rf"\b(def|class) {name}\b", text) is not None
