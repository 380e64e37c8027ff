# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flexkv.session.state_reports import StateReport, read_states
from flexkv.system.processes import pid_namespace
from flexkv.types.errors import ArenaError
from packages.patience import wait_until

ABOUT = {"tier": "mooncake", "store": "node:50051"}

ENGINE = """
import sys
from flexkv.session.state_reports import StateReport
StateReport(sys.argv[1], {"store": "of a killed engine"}).begin(dict)
print("ready", flush=True)
sys.stdin.read()
"""


def await_states(root: Path, expected: list[dict[str, object]]) -> None:
    wait_until(
        lambda: read_states(str(root)) == expected, describe=lambda: f"{read_states(str(root))}"
    )


def files(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if ".store" in path.name]


def test_others_read_what_a_store_is_like_until_it_is_closed(tmp_path: Path) -> None:
    root = tmp_path / "run"
    now = {"reads": "closed"}
    states = StateReport(str(root), ABOUT)
    assert read_states(str(root)) == []
    states.begin(lambda: now)
    (found,) = read_states(str(root))
    own = {"pid": os.getpid(), "pid_namespace": pid_namespace(), **ABOUT}
    assert found == {**own, "reads": "closed"}
    (file,) = files(root)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    now["reads"] = "open"
    await_states(root, [{**own, "reads": "open"}])
    states.close()
    states.close()
    assert (read_states(str(root)), files(root)) == ([], [])


def test_an_odd_error_does_not_end_the_reports(tmp_path: Path) -> None:
    root, now = tmp_path / "run", {"reads": "closed"}
    failed: list[str] = []

    def read() -> dict[str, str]:
        if now["reads"] == "open" and not failed:
            failed.append("once")
            raise MemoryError
        return now

    states = StateReport(str(root), ABOUT)
    states.begin(read)
    (found,) = read_states(str(root))
    now["reads"] = "open"
    await_states(root, [{**found, "reads": "open"}])
    assert failed == ["once"]
    states.close()


def test_what_a_killed_engine_left_counts_for_nothing_and_is_removed(tmp_path: Path) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert engine.stdout is not None
    assert engine.stdout.readline() == "ready\n"
    (found,) = read_states(str(tmp_path / "run"))
    assert (found["pid"], found["store"]) == (engine.pid, "of a killed engine")
    engine.kill()
    engine.communicate()
    assert read_states(str(tmp_path / "run")) == []
    assert len(files(tmp_path / "run")) == 1

    states = StateReport(str(tmp_path / "run"), ABOUT)
    states.begin(dict)
    assert [each["store"] for each in read_states(str(tmp_path / "run"))] == [ABOUT["store"]]
    assert len(files(tmp_path / "run")) == 1
    states.close()


def test_the_file_of_an_engine_killed_while_it_made_it_is_removed(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir(mode=0o700)
    (root / f"{'0' * 16}.store.new").touch()
    states = StateReport(str(root), ABOUT)
    states.begin(dict)
    assert [path.suffix for path in files(root)] == [".store"]
    states.close()
    assert files(root) == []


def test_a_directory_that_cannot_be_used_stops_no_engine_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    root.chmod(0o777)
    states = StateReport(str(root), ABOUT)
    states.begin(dict)
    assert "this engine is missing in" in caplog.text
    with pytest.raises(ArenaError, match="others can write to it"):
        read_states(str(root))
    root.chmod(0o700)
    wait_until(lambda: read_states(str(root)))
    states.close()
    assert files(root) == []


def test_an_engine_whose_directory_is_removed_reports_on(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with contextlib.closing(StateReport(str(root), ABOUT)) as report:
        report.begin(lambda: {"reads": "closed"})
        known = read_states(str(root))
        assert len(known) == 1
        shutil.rmtree(root)
        report.update()
        assert read_states(str(root)) == known


def test_files_that_are_not_flexkvs_are_no_states(tmp_path: Path) -> None:
    root = tmp_path / "run"
    states = StateReport(str(root), ABOUT)
    states.begin(dict)
    (root / "link.store").symlink_to("/etc/passwd")
    (root / "folder.store").mkdir()
    assert len(read_states(str(root))) == 1
    second = StateReport(str(root), ABOUT)
    second.begin(dict)
    assert (root / "link.store").is_symlink()
    for each in (states, second):
        each.close()
