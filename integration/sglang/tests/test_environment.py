# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from integration.sglang import environment


def test_the_variable_chooses_a_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    monkeypatch.setenv("SGLANG_PYTHON", str(python))
    assert environment.python() == python


def test_a_python_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SGLANG_PYTHON", str(tmp_path / "python"))
    with pytest.raises(environment.EnvironmentMissingError, match=f"{tmp_path}.*SGLANG_PYTHON"):
        environment.python()


@pytest.mark.parametrize(("session", "allowed"), [("tests", False), (None, True)])
def test_nox_skips_no_test_that_needs_sglang(
    monkeypatch: pytest.MonkeyPatch, session: str | None, allowed: bool
) -> None:
    if session is None:
        monkeypatch.delenv("NOX_CURRENT_SESSION", raising=False)
    else:
        monkeypatch.setenv("NOX_CURRENT_SESSION", session)
    assert environment.may_be_missing() is allowed
