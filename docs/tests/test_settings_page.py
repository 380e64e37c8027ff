# SPDX-License-Identifier: Apache-2.0
"""The settings page must say what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import settings_page
from flexkv.settings import CONFIG_PATH_VARIABLE, SETTINGS


def test_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert settings_page.main(["--check"]) == 0, capsys.readouterr().out


def test_page_names_every_setting_with_variable_unit_and_default() -> None:
    lines = settings_page.page().splitlines()
    for setting in SETTINGS.values():
        row = next(line for line in lines if line.startswith(f"| [`{setting.name}`]"))
        assert f"`{setting.variable}`" in row
        assert setting.kind.unit in row
        text, _, computed = setting.help.partition(settings_page.COMPUTED)
        assert text.strip() in lines
        if computed:
            assert f"- Default: {computed}" in lines
    assert any(CONFIG_PATH_VARIABLE in line for line in lines)


def test_a_stale_page_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "settings.md"
    monkeypatch.setattr(settings_page, "PAGE", stale)
    assert settings_page.main(["--check"]) == 1  # there is none at all
    stale.write_text(settings_page.page().replace("GiB", "GB", 1), encoding="utf-8")
    assert settings_page.main(["--check"]) == 1
    assert "nox -s docs -- --write" in capsys.readouterr().out
    assert settings_page.main(["--write"]) == 0
    assert settings_page.main(["--check"]) == 0


def test_no_default_is_printed_as_a_python_value() -> None:
    page = settings_page.page()
    assert "``" not in page.replace("```", "")
    assert [each for each in ("`(", "None", "True", "False") if each in page] == []


def test_what_a_setting_means_for_an_engine_is_said_of_a_setting() -> None:
    assert set(settings_page.ENGINES) <= set(SETTINGS)
    for text in settings_page.ENGINES.values():
        assert f"\n{text}\n" in settings_page.page()
