# SPDX-License-Identifier: Apache-2.0
"""Stored answers of engines without FlexKV, so that tests need not start such an engine.

A `StandIn` takes the place of a plain engine. It looks up each call in a `Ledger` of the files in
`integration/golden`, one file per engine and version. The real engine starts at the first call that
is not stored: it repeats the calls that matter, and answers all calls from then on. Only answers in
float32 are stored, since those in bfloat16 depend on the batch.

Another processor may give other answers. `golden_pytest` then has the real engine answer.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "golden"
VARIABLE = "GOLDEN_ANSWERS"
"""FlexKV would refuse a variable of its own prefix that it does not know."""

TOLERANCE = 1e-4
"""Largest difference between a stored log probability and a real one. It is a tenth of what tests
allow (`reference.LOGPROB_TOLERANCE`), and more than the order of float32 additions changes."""

_DIGITS = 6
_PATH = re.compile(r"(?:(?P<name>\w+)=)?(?P<path>/.*)", re.DOTALL)


class Mode(enum.Enum):
    """What a process does with stored answers."""

    STORED = "stored"
    """They stand for a plain engine."""
    CHECK = "check"
    """The plain engine answers; a stored answer that differs or is missing is a failure."""
    WRITE = "write"
    """The plain engine answers, and its answers are stored."""
    OFF = "off"
    """The plain engine answers."""

    @classmethod
    def chosen(cls, environment: Mapping[str, str]) -> Mode:
        """The mode that `VARIABLE` names. Raises ValueError for an unknown one."""
        value = environment.get(VARIABLE, cls.STORED.value)
        try:
            return cls(value)
        except ValueError:
            allowed = ", ".join(mode.value for mode in cls)
            raise ValueError(f"{VARIABLE}={value} in the environment; allowed: {allowed}") from None


@dataclass(slots=True)
class Ledger:
    """The stored answers, and what this process found out about them.

    Args:
        folder: of the files.
        mode: what to do with them.

    Attributes:
        live: plain engines answer although `mode` is STORED.
        used: whether a stored answer was given.
        differing, missing: file and key of each real answer that differs from the stored one, or
            has no stored one.
        asked: the real answers, by file and key.
    """

    folder: Path
    mode: Mode
    live: bool = False
    used: bool = False
    differing: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    _books: dict[str, dict[str, Any]] = field(default_factory=dict)

    def find(self, book: str, key: str) -> Any:
        """The stored answer that may stand for a real one; KeyError if there is none."""
        if self.mode is not Mode.STORED or self.live:
            raise KeyError(key)
        answer = self._book(book)[key]
        self.used = True
        return answer

    def note(self, book: str, key: str, answer: Any) -> None:
        """Compare the answer of a plain engine with the stored one, or keep it to be stored."""
        if self.mode is Mode.OFF:
            return
        before = self.asked.setdefault(book, {})
        known = before if self.mode is Mode.WRITE else self._book(book)
        if key in known and not same(known[key], answer):
            self.differing.add(f"{book} {key}")
        elif key not in known and self.mode is not Mode.WRITE:
            self.missing.add(f"{book} {key}")
        before.setdefault(key, answer)

    def write(self, asked: Mapping[str, Mapping[str, Any]], *, complete: bool) -> None:
        """Store the answers of a run, a line each. After a complete one nothing else is stored."""
        self.folder.mkdir(exist_ok=True)
        if complete:
            for path in self.folder.glob("*.json"):
                if path.stem not in asked:
                    path.unlink()
        for book, answers in asked.items():
            merged = dict(answers) if complete else {**self._book(book), **answers}
            lines = [f"{json.dumps(key)}: {_compact(merged[key])}" for key in sorted(merged)]
            draft = self.folder / f".{book}.{os.getpid()}"
            draft.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
            draft.rename(self.folder / f"{book}.json")

    def _book(self, book: str) -> dict[str, Any]:
        if book not in self._books:
            path = self.folder / f"{book}.json"
            text = path.read_text(encoding="utf-8") if path.exists() else "{}"
            self._books[book] = json.loads(text)
        return self._books[book]


@functools.cache
def process_ledger() -> Ledger:
    """The ledger of this process."""
    return Ledger(FOLDER, Mode.chosen(os.environ))


@dataclass(frozen=True, slots=True)
class _Call:
    key: str
    asked: Any
    perform: Callable[[], Any]
    lasting: bool


class StandIn:
    """Answers calls to a plain engine from the ledger, or by the real engine.

    The key of a call is a digest of the engine, of the calls that the engine may remember, and of
    the call. A stored answer has at most six digits behind the point, and so has a real one.

    Args:
        book: file of the answers, without its suffix.
        engine: all that answers depend on beside the calls; None if they must not be stored.
        remembers: whether an answer depends on earlier calls, such as by the prefix cache.
        ledger: of the process, unless a test has another one.
    """

    def __init__(
        self,
        book: str,
        engine: Mapping[str, Any] | None,
        *,
        remembers: bool = True,
        ledger: Ledger | None = None,
    ) -> None:
        self._ledger = process_ledger() if ledger is None else ledger
        self._book = book
        self._engine = None if engine is None else _digest(engine)
        self._remembers = remembers
        self._history: list[_Call] = []
        self._begun = self._engine is None

    def call(self, asked: Any, perform: Callable[[], Any], *, lasting: bool = False) -> Any:
        """The answer to a call, as JSON.

        Args:
            asked: what is asked, as JSON without paths.
            perform: asks the real engine, starting it if need be.
            lasting: whether the engine remembers the call after `forget`.
        """
        call = _Call(self._key(asked), asked, perform, lasting)
        earlier = list(self._history)
        if self._remembers:
            self._history.append(call)
        if not self._begun:
            try:
                return self._ledger.find(self._book, call.key)
            except KeyError:
                self._begun = True
                for each in earlier:
                    self._real(each)
        return self._real(call)

    def forget(self, perform: Callable[[], object]) -> None:
        """The engine has emptied its cache: earlier calls change no later answer, but for lasting
        ones. `perform` empties the real engine's."""
        self._history = [call for call in self._history if call.lasting]
        if self._begun:
            perform()

    def _real(self, call: _Call) -> Any:
        answer = rounded(call.perform())
        if self._engine is not None:
            self._ledger.note(self._book, call.key, answer)
        return answer

    def _key(self, asked: Any) -> str:
        """Begins with the engine and the number of calls before, so that a file's lines group."""
        past = [call.asked for call in self._history]
        return f"{(self._engine or '')[:8]} {len(past):02d} {_digest([self._engine, past, asked])}"


def rounded(value: Any) -> Any:
    """JSON with its numbers rounded as in the files."""
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return value


def same(one: Any, other: Any) -> bool:
    """Whether two answers are equal, but for small differences of log probabilities."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, int | float) and isinstance(other, int | float)
        return numbers and abs(one - other) <= TOLERANCE
    return bool(one == other)


def portable(value: Any) -> Any:
    """JSON in which a digest of contents stands for each file and folder, also in "NAME=PATH". The
    folders of tests have other paths in each run."""
    if isinstance(value, str | Path):
        found = _PATH.fullmatch(str(value))
        if found is None or not os.path.exists(found["path"]):
            return str(value)
        return f"{found['name'] or ''}={digest_of_files(Path(found['path']))}"
    if isinstance(value, Mapping):
        return {name: portable(each) for name, each in value.items()}
    if isinstance(value, Sequence):
        return [portable(each) for each in value]
    return value


def digest_of_files(path: Path) -> str:
    """Digest of the names and bytes of the files under a folder, or of one file."""
    digest = hashlib.blake2b(digest_size=16)
    for file in _files(path):
        digest.update(f"\0{file.relative_to(path)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def without_cores(binding: str) -> str:
    """How many cores each rank has, of a text such as "0,1|2,3": not which."""
    return re.sub(r"\d+", "n", binding)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        yield from sorted(each for each in path.rglob("*") if each.is_file())


def _digest(value: Any) -> str:
    return hashlib.blake2b(_compact(value).encode(), digest_size=8).hexdigest()


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
