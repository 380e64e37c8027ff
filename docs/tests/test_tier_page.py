# SPDX-License-Identifier: Apache-2.0
"""The page of a new tier: its example is short, and a copy of the core with its three changes has
the tier."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from packages.flexkv.tests.shared_node import FINGERPRINT, PATIENCE_SECONDS, Remote

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pages" / "design" / "tier.md"
MOST_LINES = 150
PLACES = {
    "types/changes.py": '    OBJECTS = "objects"\n',
    "settings/config.py": "    block_tokens: int | None = setting(\n",
}


def blocks() -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where Python finds the core with the page's changes."""
    core = tmp_path / "src" / "flexkv"
    shutil.copytree(
        ROOT / "packages" / "flexkv" / "src" / "flexkv",
        core,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    store, *changes = blocks()
    (core / "tiers" / "sqlite.py").write_text(store)
    for (name, before), change in zip(PLACES.items(), changes, strict=True):
        text = (core / name).read_text()
        assert before in text
        (core / name).write_text(text.replace(before, change + before))
    return os.pathsep.join([str(core.parent), *sys.path])


@pytest.fixture
def start(path: str, tmp_path: Path) -> Iterator[Callable[[], Remote]]:
    limits = dict.fromkeys(("sqlite_question_seconds", "sqlite_timeout_seconds"), PATIENCE_SECONDS)
    settings = {"sqlite_path": str(tmp_path / "blocks.db"), **limits}
    made: list[Remote] = []

    def start() -> Remote:
        made.append(Remote(settings, {}, ["env", f"PYTHONPATH={path}"]))
        return made[-1]

    yield start
    for node in made:
        node.kill()


def test_the_example_is_short() -> None:
    assert sum(len(each.splitlines()) for each in blocks()[:1]) <= MOST_LINES


def test_settings_know_the_store_for_one_that_engines_share(path: str) -> None:
    code = "CacheConfig(sqlite_path='/kv', max_age_seconds=60)"
    command = [sys.executable, "-c", f"from flexkv import CacheConfig; {code}"]
    environ = os.environ | {"PYTHONPATH": path}
    refused = subprocess.run(command, env=environ, text=True, capture_output=True, check=False)
    assert "max_age_seconds is 60, and sqlite_path is set, whose store keeps" in refused.stderr


def test_two_processes_share_blocks_and_a_clear_hides_them(
    start: Callable[[], Remote], path: str, tmp_path: Path
) -> None:
    one, other = start(), start()
    one.do("store", "abc")
    assert other.do("fetch", "abcd") == "abc"
    environ = os.environ | {"PYTHONPATH": path, "FLEXKV_SQLITE_PATH": str(tmp_path / "blocks.db")}

    def flexkv(*command: str) -> str:
        whole = [sys.executable, "-m", "flexkv", *command]
        return subprocess.check_output(whole, env=environ, text=True, timeout=PATIENCE_SECONDS)

    cleared = flexkv("clear", "stores", FINGERPRINT, "--yes")
    assert cleared == f"cleared {tmp_path / 'blocks.db'}, fingerprint {FINGERPRINT}\n"
    third = start()
    assert third.do("fetch", "abc") == ""
    one.do("store", "xyz")
    assert third.do("fetch", "xyz") == other.do("fetch", "xyz") == "xyz"
