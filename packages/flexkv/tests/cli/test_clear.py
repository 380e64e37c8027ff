# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse

import pytest

from flexkv.cli import clear
from packages.flexkv.tests.cli.stores import (
    OTHER_FINGERPRINT,
    Cache,
    Flexkv,
    FlexkvOnTerminal,
    snapshot,
)


def test_clear_removes_what_no_engine_owns(flexkv: Flexkv, cache: Cache) -> None:
    cache.fill(1)
    (cache.root / "notes").write_text("mine", encoding="utf-8")
    ended = flexkv("clear", cache.root, "--yes")
    assert ended.code == 0
    assert f"removed {cache.folder}, " in ended.out
    assert [path.name for path in cache.root.iterdir()] == ["notes"]


def test_clear_names_and_leaves_a_folder_in_use(flexkv: Flexkv, cache: Cache) -> None:
    with cache.owned() as process:
        with cache.owned(fingerprint=OTHER_FINGERPRINT):
            pass
        ended = flexkv("clear", cache.root, "--yes")
        assert ended.code == 1
        assert f"skipped {cache.folder}: in use by process {process}\n" in ended.out
        assert f"removed {cache.root / OTHER_FINGERPRINT}, " in ended.out
        assert [path.name for path in cache.root.iterdir()] == [cache.folder.name]
        assert flexkv("stat", cache.root, "--json").json["folders"][0]["owner"] == process


def test_a_dry_run_says_what_clear_would_do_and_does_nothing(flexkv: Flexkv, cache: Cache) -> None:
    with cache.owned() as process:
        with cache.owned(fingerprint=OTHER_FINGERPRINT):
            pass
        other = cache.root / OTHER_FINGERPRINT
        (other / "lock").unlink()
        before = snapshot(cache.root)
        dry = flexkv("clear", cache.root, "--dry-run")
        assert dry.code == 1
        assert f"would skip {cache.folder}: in use by process {process}\n" in dry.out
        assert f"would remove {other}, " in dry.out
        assert snapshot(cache.root) == before
        real = flexkv("clear", cache.root, "--yes")
        said = dry.out.replace("would remove", "removed").replace("would skip", "skipped")
        assert real.out == said
    (cache.folder / "notes").write_text("mine", encoding="utf-8")
    dry = flexkv("clear", cache.root, "--dry-run", "--yes")
    assert dry.code == 1
    foreign = "which holds files that are not FlexKV's and stays"
    which = f"FlexKV's files in {cache.folder}, {foreign}\n"
    assert dry.out == f"would remove {which}"
    (cache.folder / "notes").rename(cache.root / "notes")
    assert flexkv("clear", cache.root, "--dry-run").code == 0
    assert cache.folder.exists()
    (cache.root / "notes").rename(cache.folder / "notes")
    assert flexkv("clear", cache.root, "--yes").out == f"removed {which}"
    assert [path.name for path in cache.folder.iterdir()] == ["notes"]


def test_clear_without_a_terminal_needs_yes(flexkv: Flexkv, cache: Cache) -> None:
    cache.fill(1)
    ended = flexkv("clear", cache.root)
    assert ended.code == 2
    assert "--yes" in ended.err
    assert len(cache.records()) == 1


def test_clear_on_a_terminal_asks_first(flexkv_on_terminal: FlexkvOnTerminal, cache: Cache) -> None:
    cache.fill(1)
    for answer in ("n\n", "\n"):
        ended = flexkv_on_terminal("clear", cache.root, answer=answer)
        assert ended.code == 1
        assert str(cache.folder) in ended.out
        assert len(cache.records()) == 1
    assert flexkv_on_terminal("clear", cache.root, answer="y\n").code == 0
    assert not cache.folder.exists()


def test_an_engine_starts_anew_after_clear(flexkv: Flexkv, cache: Cache) -> None:
    cache.fill(3)
    flexkv("clear", cache.root, "--yes")
    cache.fill(2, read=2)
    assert flexkv("stat", cache.root, "--json").json["totals"]["used_slots"] == 2


def test_a_fingerprint_that_chooses_nothing_removes_nothing(
    flexkv: Flexkv, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.fill(1)
    chosen = ("--yes", "--fingerprint", "0" * 32)
    ended = flexkv("clear", cache.root, *chosen)
    assert (ended.code, ended.out) == (2, "")
    assert f"'{'0' * 32}' on the command line, but DIR is cleared" in ended.err
    monkeypatch.setenv("FLEXKV_SSD_CACHE_DIR", str(cache.root))
    monkeypatch.setenv("FLEXKV_SSD_CACHE_GB", "1")
    ended = flexkv("clear", *chosen)
    assert (ended.code, ended.out) == (2, "")
    assert "but the settings name no shared store; allowed: without DIR" in ended.err
    assert len(cache.records()) == 1


def test_a_malformed_fingerprint_is_one_clear_error(
    flexkv: Flexkv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXKV_OBJECTS_URL", "s3://bucket/path")
    for name in ("", "0" * 31, "F" * 32):
        ended = flexkv("clear", "--yes", "--fingerprint", name)
        assert (ended.code, ended.out) == (2, "")
        assert f"--fingerprint is {name!r} on the command line; allowed: " in ended.err


MODES = {"--engine": [], "--session": ["a"], "--prefix": ["-"], "--older-than": ["7d"], "": []}


def every_option() -> dict[str, list[str]]:
    """Each option of `clear` with a value."""
    parser = argparse.ArgumentParser(add_help=False)
    clear.add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    del defaults["directories"]
    return {
        f"--{name.replace('_', '-')}": [] if default is False else ["7d"]
        for name, default in defaults.items()
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("option", every_option())
def test_an_option_that_a_mode_does_not_read_removes_nothing(
    flexkv: Flexkv, cache: Cache, mode: str, option: str
) -> None:
    if option in ("--yes", mode) or option in clear.READS[mode]:
        return
    cache.fill(1)
    before = snapshot(cache.root)
    words = [option, *every_option()[option], *([mode] if mode else []), *MODES[mode]]
    where = [] if mode == "--older-than" else [cache.root]
    ended = flexkv("clear", *where, "--yes", *words)
    # Two modes are an error of the first of them.
    assert (ended.code, "is on the command line with" in ended.err) == (2, True) or (
        not mode and option in MODES and ended.code
    )
    assert snapshot(cache.root) == before


@pytest.mark.parametrize("option", ["--session", "--prefix", "--salt"])
def test_an_option_without_a_value_is_not_left_out(
    flexkv: Flexkv, cache: Cache, option: str
) -> None:
    cache.fill(1)
    before = snapshot(cache.root)
    assert flexkv("clear", cache.root, "--yes", option, "").code in (1, 2)
    assert snapshot(cache.root) == before
