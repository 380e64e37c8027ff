# SPDX-License-Identifier: Apache-2.0
"""A start with cache directories on mounts that really hang."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from disk_blocks import DEADLINE, FINGERPRINT, capacity_of, names, opened
from hung_calls import wait_for_all_but_one

from flexkv import KVLayout, TensorView, open_cache
from flexkv.errors import DiskError
from flexkv.settings import kinds
from flexkv.tiers.disk import claims, open_disk_tier
from flexkv.tiers.disk.directory import Folder, claim
from flexkv.tiers.job import Outcome
from packages.flexkv.tests.cli.hung_mount import hung

SLOTS = 8
KEYS = names(SLOTS)
SILENT = "has not answered for 15 s"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that hangs. A start waits no longer for it than for the others."""
    wait_for_all_but_one(monkeypatch, alone=False)
    folder = tmp_path / "hung"
    folder.mkdir()
    with hung(folder):
        yield folder


def test_a_hung_drive_costs_a_start_that_drive(
    folder: Path,
    tmp_path: Path,
    faults: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    good = tmp_path / "good"
    with opened(good, folder, slots=SLOTS) as client:
        assert client.write(KEYS) == [Outcome.DONE] * SLOTS
        assert client.read(KEYS) == [Outcome.DONE] * SLOTS
        (drive,) = client.tier.drives
        assert drive.path == str(good / FINGERPRINT)
        # The others do not take the part of the one that is missing.
        assert drive.index.num_slots == SLOTS
    errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert len(errors) == 1
    assert f"{folder} from ssd_cache_dir {SILENT}" in errors[0]
    faults(1)


def begins_to_hang(
    monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack, seconds: float | None = None
) -> list[Folder]:
    """Let the first directory of a start hang once it is claimed, and be waited for so many
    seconds. Returns its folder then."""
    folders: list[Folder] = []

    def claim_before_the_hang(roots: Sequence[str], *args: Any) -> dict[str, Folder]:
        claimed = claims.claim_all(roots, *args)
        if seconds is not None:
            monkeypatch.setattr(claims, "ANSWER_SECONDS", seconds)
        folders.append(claimed[roots[0]])
        stack.enter_context(hung(Path(roots[0])))
        return claimed

    monkeypatch.setattr("flexkv.tiers.disk.claim_all", claim_before_the_hang)
    return folders


def test_a_drive_that_begins_to_hang_during_a_start_costs_that_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    with contextlib.ExitStack() as stack:
        folders = begins_to_hang(monkeypatch, stack)
        with opened(bad, good, slots=SLOTS) as client:
            assert client.write(KEYS) == [Outcome.DONE] * SLOTS
            assert [drive.path for drive in client.tier.drives] == [str(good / FINGERPRINT)]
        assert folders[0].fd >= 0  # its thread may still use it
    folders[0].release()
    (error,) = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert f"{bad} from ssd_cache_dir {SILENT}; FlexKV starts without it" in error


def test_a_start_whose_only_drive_begins_to_hang_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        folders = begins_to_hang(monkeypatch, stack, 0.2)
        silent = "has not answered for 0.2 s"
        with pytest.raises(
            DiskError, match=rf"{tmp_path} from ssd_cache_dir {silent}.*; allowed: "
        ):
            open_disk_tier([str(tmp_path)], FINGERPRINT, 8192, capacity_of(SLOTS))
    folders[0].release()


def test_a_start_with_nothing_but_hung_drives_is_one_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "ANSWER_SECONDS", 0.2)
    silent = "has not answered for 0.2 s"
    with pytest.raises(DiskError, match=rf"{folder} from ssd_cache_dir {silent}.*; allowed: "):
        open_disk_tier([str(folder)], FINGERPRINT, 8192, capacity_of(SLOTS))


def test_a_program_opens_its_cache_beside_a_hung_drive(folder: Path, tmp_path: Path) -> None:
    """From the settings on, which compare the directories with each other."""
    pages = np.zeros((4, 16, 64), np.uint8)
    config = {
        "cpu_cache_gb": 0.001,
        "ssd_cache_dir": f"{folder};{tmp_path / 'good'}",
        "ssd_cache_gb": 0.002,
    }
    layout = KVLayout.from_tensors([TensorView.of("layer", pages)], 4)
    with open_cache(config, layout, identity=["model"]):
        assert len(list((tmp_path / "good").iterdir())) == 1


def test_directories_that_answer_are_compared_beside_one_that_hangs(
    folder: Path, tmp_path: Path
) -> None:
    good = tmp_path / "good"
    (tmp_path / "link").symlink_to(good)
    paths = (str(folder), str(good))
    assert kinds.paths().parse(";".join(paths)) == paths
    with pytest.raises(ValueError):  # noqa: PT011 - the parsers' own, without a message
        kinds.paths().parse([*paths, str(tmp_path / "link")])
    with pytest.raises(ValueError):  # noqa: PT011
        kinds.paths().parse([*paths, str(folder)])


def test_a_directory_that_answers_too_late_is_free_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, good = tmp_path / "late", tmp_path / "good"
    answers = threading.Event()
    claimed: list[Folder] = []

    def slow_claim(root: str, fingerprint: str, share: bool) -> Folder:
        if root == str(late):
            answers.wait()
        folder = claim(root, fingerprint, share)
        if root == str(late):
            claimed.append(folder)
        return folder

    wait_for_all_but_one(monkeypatch, alone=False)
    monkeypatch.setattr(claims, "claim", slow_claim)
    with opened(good, late, slots=SLOTS) as client:
        assert [drive.path for drive in client.tier.drives] == [str(good / FINGERPRINT)]
        answers.set()
        deadline = time.monotonic() + DEADLINE
        while not claimed or claimed[0].lock >= 0:
            assert time.monotonic() < deadline, "the folder is kept"
            time.sleep(0.01)
        claim(str(late), FINGERPRINT, False).release()


def test_folders_beside_one_that_cannot_be_used_are_given_back(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for paths in (["good", "file"], ["file", "good"]):
        with pytest.raises(DiskError, match="cannot use the cache directory"):
            opened(*(tmp_path / name for name in paths)).__enter__()
        claim(str(tmp_path / "good"), FINGERPRINT, False).release()


def test_an_error_that_nobody_expects_keeps_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(folder: Folder) -> None:
        if folder.path.startswith(str(tmp_path / "poor")):
            raise MemoryError

    monkeypatch.setattr(claims, "check_table", no_memory)
    with pytest.raises(MemoryError):
        claims.claim_all([str(tmp_path / name) for name in ("good", "poor")], FINGERPRINT, False)
    for name in ("good", "poor"):
        claim(str(tmp_path / name), FINGERPRINT, False).release()


def test_ctrl_c_while_a_drive_hangs_keeps_no_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook, for instance, lives on."""
    good = str(tmp_path / "good")

    def interrupted(futures: Iterable[Future[object]], seconds: float) -> NoReturn:
        deadline = time.monotonic() + DEADLINE
        while not any(each.done() for each in futures):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr("flexkv.deadline.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        claims.claim_all([good, str(folder)], FINGERPRINT, False)
    claim(good, FINGERPRINT, False).release()
