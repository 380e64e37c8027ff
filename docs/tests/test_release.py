# SPDX-License-Identifier: Apache-2.0
"""A release is stopped if a file names another version, or the changelog does not have it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from deploy import release

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2027-01-01\n\n- New.\n\n## [0.1.0]\n"
WORKFLOWS = sorted((release.ROOT / ".github" / "workflows").glob("*.yml"))
SAME = {"version in a": "0.2.0", "flexkv in b": "0.2.0"}


def test_all_files_name_one_version() -> None:
    found = release.versions()
    assert len(found) == 12  # 4 of distributions, 5 of requirements, 3 in the code
    assert len(set(found.values())) == 1


def test_a_checkout_that_agrees_can_be_released() -> None:
    assert release.faults("v0.2.0", SAME, CHANGELOG) == []
    assert release.notes("v0.2.0", CHANGELOG) == "- New."


@pytest.mark.parametrize(
    ("tag", "found", "said"),
    [
        ("0.2.0", SAME, "the tag is '0.2.0'; allowed: v and a version, for example v0.1.0"),
        ("v0.2", SAME, "the tag is 'v0.2'; allowed: v and a version, for example v0.1.0"),
        (
            "v0.2.0",
            {**SAME, "flexkv in b": "0.1.0"},
            "flexkv in b is '0.1.0'; allowed with the tag v0.2.0: '0.2.0'",
        ),
        (
            "v0.1.0",
            {"version in a": "0.1.0"},
            "CHANGELOG.md has no section '0.1.0'; allowed: one with changes in it",
        ),
    ],
)
def test_one_that_does_not_is_stopped(tag: str, found: dict[str, str], said: str) -> None:
    assert release.faults(tag, found, CHANGELOG) == [said]


def test_a_version_in_the_code_that_is_missing_is_noticed(tmp_path: Path) -> None:
    for file in (*(f"{each}/pyproject.toml" for each in release.DISTRIBUTIONS), *release.IN_CODE):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((release.ROOT / file).read_text())
    (tmp_path / release.IN_CODE[0]).write_text("version = 1\n")
    missing = [place for place, found in release.versions(tmp_path).items() if found == "missing"]
    assert missing == [f"__version__ in {release.IN_CODE[0]}"]


def test_wheels_are_built_as_for_a_release() -> None:
    text = (release.ROOT / "noxfile.py").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^BUILDERS = (\[.*\])$", text, re.MULTILINE)
    builders = " ".join(ast.literal_eval(listed))
    workflow = (release.ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    installed = re.findall(r"pip install (build.*)", workflow)
    assert set(installed) == {builders}
    (packages,) = re.findall(r"package: \[(.*)\]", workflow)
    for package in packages.split(", "):
        assert f'"{package}"' in text
    assert {f"packages/{each}" for each in packages.split(", ")} | {"kernels"} == set(
        release.DISTRIBUTIONS
    )


def test_the_kernels_pass_their_trial() -> None:
    assert release.kernels_fault() is None


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(workflow: Path) -> None:
    used = re.findall(r"^ *(?:- )?uses: (.*)$", workflow.read_text(), re.MULTILINE)
    assert used
    assert [
        each for each in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", each)
    ] == []


def test_only_a_tag_publishes() -> None:
    text = (release.ROOT / ".github" / "workflows" / "release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    for name in ("pypi", "manifests", "notes"):
        assert jobs[name]["if"] == "github.ref_type == 'tag'"
    (build,) = [step for step in jobs["images"]["steps"] if step.get("id") == "build"]
    assert build["with"]["push"] == "${{ github.ref_type == 'tag' }}"
