# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

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
    ended = flexkv("clear", "folders", cache.root, "--yes")
    assert ended.code == 0
    assert f"removed {cache.folder}, " in ended.out
    assert [path.name for path in cache.root.iterdir()] == ["notes"]


def test_clear_names_and_leaves_a_folder_in_use(flexkv: Flexkv, cache: Cache) -> None:
    with cache.owned() as process:
        with cache.owned(fingerprint=OTHER_FINGERPRINT):
            pass
        ended = flexkv("clear", "folders", cache.root, "--yes")
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
        dry = flexkv("clear", "folders", cache.root, "--dry-run")
        assert dry.code == 1
        assert f"would skip {cache.folder}: in use by process {process}\n" in dry.out
        assert f"would remove {other}, " in dry.out
        assert snapshot(cache.root) == before
        real = flexkv("clear", "folders", cache.root, "--yes")
        said = dry.out.replace("would remove", "removed").replace("would skip", "skipped")
        assert real.out == said
    (cache.folder / "notes").write_text("mine", encoding="utf-8")
    dry = flexkv("clear", "folders", cache.root, "--dry-run", "--yes")
    assert dry.code == 1
    foreign = "which holds files that are not FlexKV's and stays"
    which = f"FlexKV's files in {cache.folder}, {foreign}\n"
    assert dry.out == f"would remove {which}"
    (cache.folder / "notes").rename(cache.root / "notes")
    assert flexkv("clear", "folders", cache.root, "--dry-run").code == 0
    assert cache.folder.exists()
    (cache.root / "notes").rename(cache.folder / "notes")
    assert flexkv("clear", "folders", cache.root, "--yes").out == f"removed {which}"
    assert [path.name for path in cache.folder.iterdir()] == ["notes"]


def test_clear_without_a_terminal_needs_yes(flexkv: Flexkv, cache: Cache) -> None:
    cache.fill(1)
    ended = flexkv("clear", "folders", cache.root)
    assert ended.code == 2
    assert "--yes" in ended.err
    assert len(cache.records()) == 1


def test_clear_on_a_terminal_asks_first(flexkv_on_terminal: FlexkvOnTerminal, cache: Cache) -> None:
    cache.fill(1)
    for answer in ("n\n", "\n"):
        ended = flexkv_on_terminal("clear", "folders", cache.root, answer=answer)
        assert ended.code == 1
        assert str(cache.folder) in ended.out
        assert len(cache.records()) == 1
    assert flexkv_on_terminal("clear", "folders", cache.root, answer="y\n").code == 0
    assert not cache.folder.exists()


def test_an_engine_starts_anew_after_clear(flexkv: Flexkv, cache: Cache) -> None:
    cache.fill(3)
    flexkv("clear", "folders", cache.root, "--yes")
    cache.fill(2, read=2)
    assert flexkv("stat", cache.root, "--json").json["totals"]["used_slots"] == 2


def test_all_folders_of_the_settings_are_said_by_a_word(
    flexkv: Flexkv, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.fill(1)
    monkeypatch.setenv("FLEXKV_SSD_CACHE_DIR", str(cache.root))
    monkeypatch.setenv("FLEXKV_SSD_CACHE_GB", "1")
    for words in ((), ("folders",), ("stores",), ("engines",), ("service",)):
        ended = flexkv("clear", *words, "--yes")
        assert (ended.code, ended.out) == (2, "")
        assert "the following arguments are required: " in ended.err
    assert len(cache.records()) == 1
    ended = flexkv("clear", "folders", "all", "--yes")
    assert (ended.code, cache.folder.exists()) == (0, False)


def test_shared_stores_that_the_settings_do_not_name_are_one_clear_error(flexkv: Flexkv) -> None:
    for name in ("all", "0" * 32):
        ended = flexkv("clear", "stores", name, "--yes")
        assert (ended.code, ended.out) == (2, "")
        assert "the settings name no shared store; allowed: with mooncake_master or" in ended.err


@pytest.mark.parametrize("what", ["stores", "service", "engines"])
def test_a_malformed_fingerprint_is_one_clear_error(
    flexkv: Flexkv, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("FLEXKV_OBJECTS_URL", "s3://bucket/path")
    for name in ("", "0" * 31, "F" * 32, "ALL"):
        ended = flexkv("clear", what, name, "--yes")
        assert (ended.code, ended.out) == (2, "")
        assert f"NAME is {name!r} on the command line; allowed: `all`, or a finger" in ended.err


READS = {
    "folders": {"--dry-run"},
    "stores": {"--dry-run"},
    "service": {"--dry-run"},
    "engines": {"--dry-run"},
    "prompt": {"--fingerprint", "--hashes", "--salt"},
    "session": {"--fingerprint", "--salt"},
    "older": {"--dry-run"},
}
OPTIONS = {"--dry-run": [], "--fingerprint": ["ab"], "--hashes": [], "--salt": ["a"]}


@pytest.mark.parametrize("what", READS)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_is_not_read_is_an_error(
    flexkv: Flexkv, cache: Cache, what: str, option: str
) -> None:
    """It may have been meant to limit what is removed."""
    if option in READS[what]:
        assert option in flexkv("clear", what, "--help").out
        return
    cache.fill(1)
    before = snapshot(cache.root)
    ended = flexkv("clear", what, cache.root, option, *OPTIONS[option], "--yes")
    assert (ended.code, "unrecognized arguments: " in ended.err) == (2, True)
    assert snapshot(cache.root) == before
