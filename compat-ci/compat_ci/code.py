# SPDX-License-Identifier: Apache-2.0
"""Which code of ours a result is of."""

from __future__ import annotations

import hashlib
import subprocess

from compat_ci.matrix import ROOT, Engine


def digest(engine: Engine) -> str:
    """Of the names and contents of the files that `engine.concerns` names."""
    made = hashlib.blake2b(digest_size=8)
    for folder in engine.concerns:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                content = path.read_bytes()
                made.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return made.hexdigest()


def commit(engine: Engine) -> str:
    """The commit that has these files; "uncommitted" if none has."""
    folders = [str(folder) for folder in engine.concerns]
    if _git("status", "--porcelain", "--", *folders):
        return "uncommitted"
    return _git("rev-parse", "--short=8", "HEAD")


def _git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
