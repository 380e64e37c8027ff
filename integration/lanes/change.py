# SPDX-License-Identifier: Apache-2.0
"""What a change is: the files that differ from a commit of git."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_UPSTREAM = ("@{upstream}", "origin/main", "main")
"""What work is compared with: the first of these that exists."""


def changed_files(root: Path = ROOT, base: str | None = None, *, removed: bool = False) -> set[str]:
    """Files that differ from a commit, committed or not, as paths from `root`.

    Args:
        root: a checkout.
        base: the commit; None: where the work left the main branch.
        removed: whether removed files count, and the old names of renamed ones.

    Raises:
        subprocess.CalledProcessError: `root` is no checkout, or git does not know `base`.
    """
    shown = "--no-renames" if removed else "--diff-filter=d"
    there = _git(root, "diff", "--name-only", shown, base or base_of_change(root), check=True)
    return {*there, *_git(root, "ls-files", "--others", "--exclude-standard", check=True)}


def base_of_change(root: Path = ROOT) -> str:
    """The commit that the work in `root` began at: its merge base with the main branch."""
    return next(
        (b[0] for name in _UPSTREAM if (b := _git(root, "merge-base", "HEAD", name))), "HEAD"
    )


def has_commit(commit: str, root: Path = ROOT) -> bool:
    """Whether HEAD builds on `commit`; False in a folder that is no checkout."""
    return _git(root, "merge-base", "HEAD", commit) == [commit]


def head_if_clean(root: Path = ROOT) -> str:
    """The commit of HEAD if nothing differs from it, else ""."""
    if _git(root, "status", "--porcelain"):
        return ""
    return "".join(_git(root, "rev-parse", "HEAD"))


def _git(root: Path, *command: str, check: bool = False) -> list[str]:
    """Lines that git prints; none if it fails and `check` is not set."""
    done = subprocess.run(
        ["git", *command],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=None if check else subprocess.DEVNULL,
        text=True,
        check=check,
    )
    return done.stdout.splitlines() if done.returncode == 0 else []
