# SPDX-License-Identifier: Apache-2.0
"""`flexkv top` on mounts that really hang."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from packages.flexkv.tests.cli.hung_mount import hung
from packages.flexkv.tests.cli.screen import Screen, on_terminal
from packages.flexkv.tests.cli.served import served
from packages.flexkv.tests.cli.stores import FINGERPRINT, Cache, Flexkv

ENDS: dict[str, Callable[[Screen], int]] = {
    "q": lambda screen: screen.end_by_key("q"),
    "Ctrl-C": Screen.interrupt,
}


@pytest.mark.parametrize("key", ENDS)
def test_a_directory_that_hangs_from_the_start_is_named_beside_an_engine(
    tmp_path: Path, key: str
) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    with (
        served() as engine,
        hung(folder),
        on_terminal("top", str(folder), f"127.0.0.1:{engine.port}") as screen,
    ):
        # Each pattern after the one before: the view goes on, however late each view is.
        silent = rf"{folder} has not answered for (\d+) s"
        first = int(screen.wait_for(silent)[1])
        screen.wait_for("50.0 % since its start")
        assert any(int(screen.wait_for(silent)[1]) > first for _ in range(10))
        screen.wait_for("the drive, the network or the driver behind it hangs")
        screen.wait_for("50.0 % since its start")
        assert ENDS[key](screen) == 1


def test_a_directory_that_begins_to_hang_keeps_its_old_figures_and_comes_back(
    cache: Cache,
) -> None:
    cache.fill(5)
    with on_terminal("top", str(cache.root), "--interval", "0.2") as screen:
        screen.wait_for(FINGERPRINT)
        with hung(cache.root):
            screen.wait_for(rf"{cache.root} has not answered for \d+ s; the figures are old")
            screen.wait_for(FINGERPRINT)
            screen.wait_for("figures are old")
        # What hung has failed; the next attempt does not.
        screen.wait_for(rf"─ {cache.root} ─+╮(?:(?!are old)[^╯])*{FINGERPRINT}[^╯]*╯")
        assert screen.end_by_key("q") == 0


def test_a_directory_that_hangs_is_named_once_in_a_pipe(flexkv: Flexkv, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    with hung(folder):
        ended = flexkv("top", folder)
    assert ended.code == 1
    assert "kv has not answered for" in " ".join(re.split(r"[\s│]+", ended.out))
    assert ended.err == ""
