# SPDX-License-Identifier: Apache-2.0
"""One process of a machine measures at a time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from flexkv_kernels import calibration_file
from flexkv_kernels.calibration_file import CalibrationFile


def test_processes_take_turns(tmp_path: Path) -> None:
    order: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def first() -> None:
        with CalibrationFile(tmp_path, ["one"], []).turn():
            order.append("first begins")
            begun.set()
            may_end.wait(30)
            order.append("first ends")

    def second() -> None:
        with CalibrationFile(tmp_path, ["another"], []).turn():
            order.append("second begins")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    threads[1].join(0.2)
    assert order == ["first begins"]
    may_end.set()
    for thread in threads:
        thread.join(30)
    assert order == ["first begins", "first ends", "second begins"]


def test_a_process_that_hangs_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibration_file, "LOCK_SECONDS", 0.1)
    one, another = (CalibrationFile(tmp_path, [name], []) for name in ("one", "another"))
    with one.turn(), another.turn():
        pass
    assert "this one measures beside it" in caplog.text


def test_without_a_folder_processes_measure_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = CalibrationFile(tmp_path / "file", ["one"], [])
    with file.turn(), file.turn():
        assert file.read() is None


def test_an_error_ends_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_file, "LOCK_SECONDS", 0.0)
    with pytest.raises(MemoryError), CalibrationFile(tmp_path, [], []).turn():
        raise MemoryError
    with CalibrationFile(tmp_path, [], []).turn():
        assert len(list(tmp_path.iterdir())) == 1
