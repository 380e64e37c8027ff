# SPDX-License-Identifier: Apache-2.0
"""The table of versions as Markdown: a page of the docs, and the summary of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from compat_ci import code
from compat_ci.matrix import Engine, Level, Release
from compat_ci.results import Outcomes, Table

_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}

_PAGE_HEAD = """\
<!-- Written by compat-ci from what its runs found: `nox -s compat-report -- --write`. -->

# Compatibility

Each cell has the result of a run, its date, and the commit of FlexKV that ran. *Older* stands there
once the adapter, the engine's side of the cache or the copies have changed. A level includes the
levels before it:

- **static** compares the adapter with the Python files of the engine's wheel, without running
  either. Every imported name exists, every abstract method is implemented, every overridden method
  exists, every call fits its signature, and every attribute that is read exists.
- **scheduler** lets the engine's real scheduler drive the adapter through loads, delayed frees,
  preemptions, aborts and failures. It checks every byte that a request computes on. With SGLang,
  HiCache's own host pools, page names and backend loader drive the adapter.
- **engine** runs the whole engine. Answers over restored prefixes are equal to computed answers,
  token for token.
"""


def page(engines: dict[str, Engine], table: Table) -> str:
    """The page of the docs."""
    parts = [_PAGE_HEAD]
    for name, engine in engines.items():
        served = [release.version for release in engine.served]
        label = _NAMES.get(name, name)
        digest = code.digest(engine)
        newest_first = list(reversed(engine.releases))
        limits = list(dict.fromkeys(text for release in newest_first for text in release.limits))
        rows = [
            _row(release, table.get(name, {}).get(release.version, {}), limits, digest)
            for release in newest_first
        ]
        parts.append(
            f"\n## {label}\n\n"
            f"{engine.starts.format(oldest=_minor(served[0]), newest=_minor(served[-1]))}\n\n"
            "| version | pins torch | static | scheduler | engine | limits |\n"
            "|---|---|---|---|---|---|\n"
            + "".join(rows)
            + "\n"
            + "".join(f"{number}. {text}\n" for number, text in enumerate(limits, 1))
        )
        parts.append("".join(_failures(engine, table)))
    return "".join(parts)


def summary(table: Table) -> str:
    """The results of the runs of one day, for all versions in them."""
    lines = ["| engine | version | level | result | reason |\n|---|---|---|---|---|\n"]
    for engine, versions in table.items():
        for version, outcomes in versions.items():
            for level, outcome in sorted(outcomes.items()):
                result = "passed" if outcome.passed else "**failed**"
                reason = "<br>".join(map(_escaped, outcome.reasons)) or outcome.checked
                lines.append(f"| {engine} | {version} | {level} | {result} | {reason} |\n")
    return "".join(lines)


def due(engines: dict[str, Engine], table: Table) -> list[tuple[str, str]]:
    """Engine and version of all releases with a cell that is missing, failed or older: whose cells
    are the oldest first, then the newest release."""
    found = []
    for name, engine in engines.items():
        digest = code.digest(engine)
        for age, release in enumerate(reversed(engine.releases)):
            cells = table.get(name, {}).get(release.version, {})
            outcomes = [cells.get(level) for level in release.level.upto()]
            if not all(each and each.passed and each.digest == digest for each in outcomes):
                oldest = min(each.date if each else "" for each in outcomes)
                found.append((oldest, age, name, release.version))
    return [(name, version) for _, _, name, version in sorted(found)]


def _row(release: Release, outcomes: Outcomes, limits: Sequence[str], digest: str) -> str:
    """A row of the table; its last column has the numbers of the release's `limits`."""
    cells = [_cell(level, release, outcomes, digest) for level in Level]
    cells.append(", ".join(str(limits.index(text) + 1) for text in release.limits))
    return f"| {release.version} | {release.torch} | {' | '.join(cells)} |\n"


def _cell(level: Level, release: Release, outcomes: Outcomes, digest: str) -> str:
    if level > release.level:
        return "-"
    outcome = outcomes.get(level)
    if outcome is None:
        return "not run yet"
    result = "passed" if outcome.passed else "**failed**"
    of = [outcome.date, outcome.commit, "" if outcome.digest == digest else "*older*"]
    return ", ".join(filter(None, [result, outcome.checked, *of]))


def _failures(engine: Engine, table: Table) -> Iterable[str]:
    for version, outcomes in table.get(engine.name, {}).items():
        for level, outcome in sorted(outcomes.items()):
            if outcome.reasons:
                yield f"\n### {version}, {level}\n\n"
                yield from (f"- {_escaped(reason)}\n" for reason in outcome.reasons)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
