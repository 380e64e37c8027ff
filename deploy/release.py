# SPDX-License-Identifier: Apache-2.0
"""What the release workflow asks of the checkout: `python deploy/release.py --help`.

Needs only the standard library, and for `try-kernels` the installed kernels.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = ("packages/flexkv", "packages/flexkv-vllm", "packages/flexkv-sglang", "kernels")
IN_CODE = (
    "packages/flexkv/src/flexkv/version.py",
    "packages/flexkv-vllm/src/flexkv_vllm/__init__.py",
    "packages/flexkv-sglang/src/flexkv_sglang/__init__.py",
)
_IN_CODE = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
_OURS = re.compile(r"flexkv(?:-kernels)?==(.*)")


def versions(root: Path = ROOT) -> dict[str, str]:
    """The versions that the files of a checkout name, by file and place.

    Args:
        root: of the checkout.
    """
    found: dict[str, str] = {}
    for folder in DISTRIBUTIONS:
        file = f"{folder}/pyproject.toml"
        project = tomllib.loads((root / file).read_text(encoding="utf-8"))["project"]
        found[f"version in {file}"] = project["version"]
        for requirement in project["dependencies"]:
            if match := _OURS.fullmatch(requirement):
                found[f"{requirement.partition('=')[0]} in {file}"] = match[1]
    for file in IN_CODE:
        match = _IN_CODE.search((root / file).read_text(encoding="utf-8"))
        found[f"__version__ in {file}"] = "missing" if match is None else match[1]
    return found


def faults(tag: str, found: Mapping[str, str], changelog: str) -> list[str]:
    """Why this checkout cannot be released under this tag; empty if it can.

    Args:
        tag: a v and a version.
        found: what `versions` found.
        changelog: text of the changelog.
    """
    if not re.fullmatch(r"v\d+\.\d+\.\d+((a|b|rc)\d+)?", tag):
        return [f"the tag is {tag!r}; allowed: v and a version, for example v0.1.0"]
    wanted = tag.removeprefix("v")
    wrong = [
        f"{place} is {version!r}; allowed with the tag {tag}: {wanted!r}"
        for place, version in found.items()
        if version != wanted
    ]
    if notes(tag, changelog) is None:
        wrong.append(f"CHANGELOG.md has no section {wanted!r}; allowed: one with changes in it")
    return wrong


def notes(tag: str, changelog: str) -> str | None:
    """The section of the changelog for a tag; None if there is none, or nothing in it."""
    heading = re.escape(f"## [{tag.removeprefix('v')}]")
    section = re.search(rf"^{heading}.*?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return section[1].strip() or None if section else None


def kernels_fault() -> str | None:
    """What is wrong with the installed kernels; None if they copy and have CUDA."""
    import ctypes
    from array import array

    from flexkv_kernels import CpuMover, Direction, Status, cuda_unavailable

    reason = cuda_unavailable()
    if reason is not None and "built without CUDA" in reason:
        return reason
    pages = ctypes.create_string_buffer(b"page", 4096)
    arena = ctypes.create_string_buffer(4096)
    planes = [(ctypes.addressof(pages), 4096, 1, 4096, 4096, 0)]
    with_arena = (ctypes.addressof(arena), 4096)
    mover = CpuMover(planes, 1, *with_arena, threads=1)
    try:
        ticket = mover.submit(Direction.STORE, array("Q", [0]), array("Q", [0]))
        while (status := mover.poll(ticket)) is Status.PENDING:
            pass
    finally:
        mover.close()
    if status is not Status.DONE or arena.raw != pages.raw:
        return f"a copy ended as {status.name}, and its bytes are {arena.raw[:4]!r}"
    return None


def main() -> int:
    """Parse the command line and run; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("version", help="print the version")
    for name, text in (
        ("check", "fail unless all files name the tag's version, and the changelog has it"),
        ("notes", "print the changelog's section"),
    ):
        commands.add_parser(name, help=text).add_argument("tag", help="for example v0.1.0")
    commands.add_parser("try-kernels", help="fail unless the installed kernels copy and have CUDA")
    options = parser.parse_args()
    if options.command == "version":
        print(versions()["version in packages/flexkv/pyproject.toml"])
        return 0
    if options.command == "try-kernels":
        wrong = [fault] if (fault := kernels_fault()) else []
    else:
        changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        wrong = faults(options.tag, versions(), changelog)
        if options.command == "notes" and not wrong:
            print(notes(options.tag, changelog))
    for each in wrong:
        print(f"release: error: {each}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
