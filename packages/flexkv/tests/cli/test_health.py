# SPDX-License-Identifier: Apache-2.0
"""`flexkv health` over reports of engines, which `test_side_health.py` has real sides write, and
over a real service."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from flexkv.cli import common
from flexkv.session.state_reports import StateReport, Subject
from flexkv.types import deadline
from packages.flexkv.tests.cli.stores import Flexkv

Report = Callable[..., None]


@pytest.fixture
def report(tmp_path: Path) -> Iterator[Report]:
    """Reports an engine with these problems until the end of the test."""
    reports: list[StateReport] = []

    def begin(*problems: tuple[str, str], **more: object) -> None:
        about = {"engine": "vllm", "fingerprint": "ab12"}
        reports.append(StateReport(str(tmp_path / "run"), about, Subject.HEALTH))
        reports[-1].begin(lambda: {"problems": problems, **more})

    yield begin
    for each in reports:
        each.close()


@pytest.mark.parametrize(
    ("problems", "expected"),
    [
        ([], (0, "ok")),
        ([("reads", "disk")], (3, "degraded: circuit of disk open: no reads until")),
        ([("suspended", ""), ("writes", "objects")], (1, "off: a reset failed")),
        ([("from the future", "")], (1, "unknown: another version")),
    ],
)
def test_the_exit_code_is_that_of_the_worst_engine(
    flexkv: Flexkv,
    report: Report,
    tmp_path: Path,
    problems: list[tuple[str, str]],
    expected: tuple[int, str],
) -> None:
    code, text = expected
    report()
    report(*problems)
    ended = flexkv("health", tmp_path / "run")
    assert (ended.code, ended.err) == (code, "")
    lines = ended.out.splitlines()
    assert len(lines) == 2
    assert all(each.startswith("vllm, process ") for each in lines)
    assert any(f"fingerprint ab12: {text}" in each for each in lines)


def test_an_engine_of_another_container_has_no_number_of_ours(
    flexkv: Flexkv, tmp_path: Path
) -> None:
    about = {"engine": "vllm", "fingerprint": "ab12", "pid_namespace": "another"}
    with contextlib.closing(StateReport(str(tmp_path / "run"), about, Subject.HEALTH)) as report:
        report.begin(lambda: {"problems": []})
        ended = flexkv("health", tmp_path / "run")
    assert f"process {os.getpid()} of another PID namespace, such as a container's" in ended.out


def test_a_directory_without_an_engine_is_off(flexkv: Flexkv, tmp_path: Path) -> None:
    ended = flexkv("health", tmp_path / "none")
    assert (ended.code, ended.out) == (1, f"{tmp_path / 'none'}: off: no engine with FlexKV runs\n")


def test_the_settings_name_the_directory(
    flexkv: Flexkv, report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXKV_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("FLEXKV_OBJECTS_URL", "s3://bucket")  # `stat` wants to know of something
    report(("recovering", ""))
    assert flexkv("health").code == 3
    (engine,) = json.loads(flexkv("health", "--json").out)
    assert engine["state"] == "degraded"
    assert engine["text"].startswith("degraded: an error may have lost a copy")
    assert engine == json.loads(flexkv("stat", "--json").out)["engines"][0]
    assert f": {engine['text']}\n" in flexkv("stat").out


@pytest.mark.parametrize("command", ["health", "lookup -"])
def test_the_directory_of_a_service_is_waited_for(
    flexkv: Flexkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Also if it answers after more than a second, as on a busy machine."""
    late = threading.Event()

    def wait(calls: Collection[Future[Any]], seconds: float) -> Any:
        ended = futures.wait(calls, 0.05 if seconds <= 1.0 else seconds)
        late.set()
        return ended

    monkeypatch.setattr(deadline, "wait", wait)
    monkeypatch.setattr(common, "is_service", lambda _: late.wait())
    ended = flexkv(*command.split(), tmp_path, stdin=b"[1]")
    assert "service of FlexKV" in ended.out + ended.err


def test_a_directory_that_cannot_be_used_is_an_error(flexkv: Flexkv, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    ended = flexkv("health", file)
    assert (ended.code, ended.out) == (2, "")
    assert str(file) in ended.err
