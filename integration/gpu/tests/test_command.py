# SPDX-License-Identifier: Apache-2.0
"""The command: which sections run, when it ends, what is kept, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from integration.bench.rows import Goal, Row
from integration.gpu import __main__ as command
from integration.gpu import journal, running
from integration.gpu.journal import Journal
from integration.gpu.running import Run, run_command, run_section
from integration.gpu.section import SECONDS, SECTIONS

ROOT = Path(__file__).resolve().parents[3]
MACHINE = {"device": "NVIDIA H200", "driver": "580.1"}
ROW = Row("load", 1.0, "ratio", Goal(">=", 0.9), "")


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "integration.gpu", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_device_there_is_one_message_and_no_report(tmp_path: Path) -> None:
    if command.no_device() is None:
        pytest.skip("there is a CUDA device")
    out = tmp_path / "report.md"
    done = run_process("--out", str(out))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("integration.gpu: error: no CUDA device to measure: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing"], "invalid choice: 'nothing'"),
        (["--out", "report.txt"], "--out is 'report.txt'; allowed: a path that ends with .md"),
        (["--seconds", "-1"], "--seconds is -1; allowed: more than 0"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


class Sections:
    """Stands in for the processes of sections: each writes a row, some fail or do not end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.run: list[str] = []
        self.failing: set[str] = set()
        self.endless: set[str] = set()
        monkeypatch.setattr(command, "no_device", lambda: None)
        monkeypatch.setattr(command, "describe_machine", lambda _: dict(MACHINE))
        monkeypatch.setattr(command, "REPORTS", folder / "measured")
        monkeypatch.setattr(command, "ROOT", folder)
        monkeypatch.setattr(command, "PARTIAL", folder / "gpu-partial.md")
        monkeypatch.setattr(running, "run_command", self._run)

    def _run(self, arguments: list[str], seconds: float) -> tuple[list[str], str | None]:
        name, path = arguments[3], Path(arguments[4])
        self.run.append(name)
        with closing(Journal(path)) as file:
            file.row(name, Row(name, 1.0, "ratio", Goal(">=", 0.9), f"{'--quick' in arguments}"))
        if name in self.endless:
            return ["so far"], None
        return ["last line"], "exit status 1" if name in self.failing else "exit status 0"


@pytest.fixture
def sections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sections:
    return Sections(monkeypatch, tmp_path)


def document(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.with_suffix(".json").read_text())
    return found


def test_a_full_run_is_filed_under_the_device(sections: Sections, tmp_path: Path) -> None:
    assert command.main([]) == 0
    assert sections.run == list(SECTIONS)
    found = document(tmp_path / "measured" / "nvidia-h200.md")
    assert (found["partial"], found["passed"]) == (False, True)
    assert found["machine"] == MACHINE


@pytest.mark.parametrize("arguments", [["--quick"], ["--only", "submit", "submit"]])
def test_a_partial_run_does_not_replace_a_full_one(
    sections: Sections, arguments: list[str], tmp_path: Path
) -> None:
    sections.failing = {"submit"}
    assert command.main(arguments) == 1
    assert not (tmp_path / "measured").exists()
    assert document(tmp_path / "gpu-partial.md")["partial"] is True
    quick = arguments == ["--quick"]
    assert sections.run == (list(SECTIONS) if quick else ["submit"])
    record = journal.read([tmp_path / "gpu-partial.jsonl"], SECTIONS)
    assert record.sections["submit"].outcome.rows[0].detail == str(quick)
    assert record.sections["submit"].outcome.failure == "exit status 1:\nlast line"


def test_a_resumed_run_does_only_what_is_left(sections: Sections, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "report.md")]
    sections.failing = {"beside"}
    assert command.main([*out, "--only", "sweep", "beside"]) == 1
    sections.run.clear()
    sections.failing.clear()
    # A section that failed has ended; it runs again if it is named.
    assert command.main([*out, "--resume"]) == 1
    assert sections.run == [name for name in SECTIONS if name not in {"sweep", "beside"}]
    sections.run.clear()
    assert command.main([*out, "--resume", "--only", "sweep", "beside"]) == 0
    assert sections.run == ["beside"]
    assert document(tmp_path / "report.md")["partial"] is False
    assert command.main([*out, "--resume"]) == 0
    assert sections.run == ["beside"]


def test_a_new_run_keeps_the_rows_of_the_last_one(sections: Sections, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "report.md"), "--only"]
    command.main([*out, "sweep"])
    command.main([*out, "submit"])
    assert list(journal.read([tmp_path / "report.jsonl"], SECTIONS).sections) == ["submit"]
    assert list(journal.read([tmp_path / "report.jsonl.old"], SECTIONS).sections) == ["sweep"]


def test_rows_of_several_machines_become_one_report(sections: Sections, tmp_path: Path) -> None:
    names = list(SECTIONS)
    for number, part in enumerate((names[:4], names[4:])):
        command.main(["--out", str(tmp_path / f"{number}.md"), "--only", *part])
    files = [str(tmp_path / f"{number}.jsonl") for number in range(2)]
    sections.run.clear()
    assert command.main(["--merge", *files]) == 0
    assert sections.run == []
    found = document(tmp_path / "measured" / "nvidia-h200.md")
    assert (found["partial"], len(found["sections"])) == (False, len(SECTIONS))  # type: ignore[arg-type]
    # Or a later command goes on with them.
    assert command.main(["--out", str(tmp_path / "all.md"), "--resume", *files]) == 0
    assert sections.run == []
    assert document(tmp_path / "all.md")["partial"] is False


def test_rows_that_do_not_belong_together_are_refused(
    sections: Sections, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "report.md")]
    command.main([*out, "--only", "sweep"])
    assert command.main([*out, "--resume", "--quick"]) == 2
    assert "of a run without --quick; allowed: " in capsys.readouterr().err
    with closing(Journal(tmp_path / "other.jsonl")) as file:
        file.machine({"device": "NVIDIA L4"})
    assert command.main([*out, "--resume", str(tmp_path / "other.jsonl")]) == 2
    assert "the rows are of 'NVIDIA L4', this is 'NVIDIA H200'" in capsys.readouterr().err
    assert command.main(["--merge", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl cannot be read" in capsys.readouterr().err


def test_when_the_time_is_up_the_rest_is_left(
    sections: Sections, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "report.md")]
    sections.endless = {"one-way"}
    # Less than the section may take, more than is needed to begin it.
    assert command.main([*out, "--seconds", "60"]) == command.MORE
    assert sections.run == ["sweep", "smoke", "one-way"]
    assert "one-way was stopped, the time is up: --resume goes on" in capsys.readouterr().out
    assert document(tmp_path / "report.md")["partial"] is True
    sections.run.clear()
    sections.endless.clear()
    assert command.main([*out, "--seconds", "6", "--resume"]) == command.MORE
    assert sections.run == []
    assert command.main([*out, "--resume"]) == 0
    assert sections.run == [name for name in SECTIONS if name not in {"sweep", "smoke"}]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    with closing(Journal(path)) as file:
        file.machine(MACHINE)
    return path


def outcome(path: Path, name: str) -> journal.Progress:
    return journal.read([path], SECTIONS).sections[name]


def test_a_section_that_hangs_fails_and_keeps_the_rows_before(
    sections: Sections, rows: Path
) -> None:
    sections.endless = {"beside"}
    assert run_section(Run(rows, quick=False), "beside")
    found = outcome(rows, "beside")
    assert [row.what for row in found.outcome.rows] == ["beside"]
    assert found.outcome.failure == f"did not end within {SECONDS['beside']} s:\nso far"
    assert found.ended


def test_a_section_that_was_stopped_for_all_has_not_ended(sections: Sections, rows: Path) -> None:
    sections.endless = {"beside"}
    assert not run_section(Run(rows, False, time.monotonic() + 30), "beside")
    found = outcome(rows, "beside")
    assert (found.ended, found.outcome.failure) == (False, None)
    assert len(found.outcome.rows) == 1


def test_a_real_section_writes_its_rows_and_its_failure(rows: Path) -> None:
    """Without a device it ends at once, with an error that names the driver."""
    if command.no_device() is None:
        pytest.skip("there is a CUDA device")
    assert run_section(Run(rows, quick=True), "submit")
    found = outcome(rows, "submit")
    assert (found.quick, found.ended, found.outcome.rows) == (True, True, [])
    assert found.outcome.failure is not None
    assert found.outcome.failure.startswith("exit status 1:\nTraceback")


def script(tmp_path: Path, body: str, seconds: float = 600) -> tuple[list[str], str | None]:
    path = tmp_path / "script.py"
    path.write_text(f"import subprocess, sys\nprint('one', flush=True)\n{body}\n")
    return run_command([sys.executable, str(path)], seconds)


def await_true(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(stat: Path) -> bool:
    """Whether the process of a file of /proc has ended; nobody may have waited for it yet."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_lines_are_shown_and_the_end_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script(tmp_path, "") == (["one"], "exit status 0")
    assert script(tmp_path, "raise SystemExit(3)") == (["one"], "exit status 3")
    assert capsys.readouterr().out == "one\none\n"


def test_what_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    body = "subprocess.Popen(['sleep', '600'], stdout=sys.stdout).wait()  # holds the pipe"
    for seconds in (2, 20, 200):  # a slow machine needs a while to begin
        lines, status = script(tmp_path, body, seconds)
        assert status is None
        if lines:
            break
    assert lines == ["one"]


def test_what_a_command_leaves_behind_is_ended(tmp_path: Path) -> None:
    body = (
        "left = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(left.pid))"
    )
    assert script(tmp_path, body, 60)[1] == "exit status 0"
    stat = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    await_true(lambda: has_ended(stat))


def test_a_section_ends_with_the_command_that_began_it(tmp_path: Path) -> None:
    """However the command ends: the next one would measure beside what the section copies."""
    pid = tmp_path / "pid"
    section = (
        "import os, time; from integration.gpu.section import end_with_parent; end_with_parent();"
        f"open({str(tmp_path / 'new')!r}, 'w').write(str(os.getpid()));"
        f"os.rename({str(tmp_path / 'new')!r}, {str(pid)!r}); time.sleep(600)"
    )
    command = [sys.executable, "-c", section]
    begin = f"from integration.gpu.running import run_command; run_command({command!r}, 600)"
    with subprocess.Popen([sys.executable, "-c", begin], cwd=ROOT) as parent:
        try:
            await_true(pid.exists)
        finally:
            parent.kill()
    stat = Path("/proc", pid.read_text(), "stat")
    await_true(lambda: has_ended(stat))


def test_every_section_has_a_limit() -> None:
    assert SECONDS.keys() == SECTIONS.keys()
