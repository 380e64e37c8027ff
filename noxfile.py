# SPDX-License-Identifier: Apache-2.0
"""All commands of the project: `nox -l` lists them. They install what they need.

`demo`, `tests` and `bench` share one environment with an engine in it, made by `engine-cpu` (or,
for the demo on a machine with an NVIDIA GPU, by `engine-cuda`), so that it is installed only once.
"""

from __future__ import annotations

import hashlib
import pathlib
import sys

import nox

ROOT = pathlib.Path(__file__).parent
sys.path.insert(0, str(ROOT))

from integration import preflight  # noqa: E402  (needs the path above)

VLLM_VERSION = "0.32.0"
PACKAGES = ["./kernels", "-e", "./packages/flexkv", "-e", "./packages/flexkv-vllm"]
TOOLS = ["pytest>=8.4,<10", "hypothesis>=6.100,<7", "matplotlib>=3.9,<4", "rich>=13.9"]
LINTERS = [
    "ruff==0.17.5",
    "mypy==2.4.1",
    "types-PyYAML",
    "nox",
    "numpy",
    "rich>=13.9",
    "pytest>=8.4,<10",
]
TYPED = [
    "packages/flexkv/src",
    "packages/flexkv-vllm/src",
    "kernels/python",
    "integration",
    "docs",
    "noxfile.py",
]

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "tests"]
nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "virtualenv"  # not uv: it does not find torch's CPU build

# flexkv-kernels copy between CPU tensors only so far, and FlexKV refuses a KV cache on a GPU: until
# that changes the demo takes vLLM's CPU build on every machine.
CUDA_COPIES = False
DEMO_ENGINE = "engine-cuda" if CUDA_COPIES and preflight.has_nvidia_gpu() else "engine-cpu"


@nox.session(name="engine-cpu", default=False)
def engine_cpu(session: nox.Session) -> None:
    """Make the environment with vLLM for CPUs (demo, tests and bench call this themselves)."""
    _install_engine(session, "cpu")


@nox.session(name="engine-cuda", default=False)
def engine_cuda(session: nox.Session) -> None:
    """Make the environment with vLLM for NVIDIA GPUs (the demo calls this itself)."""
    _install_engine(session, "cuda")


@nox.session(venv_backend="none", requires=[DEMO_ENGINE])
def demo(session: nox.Session) -> None:
    """A conversation with a real vLLM, with and without FlexKV. `-- --help` lists its options."""
    _run(session, DEMO_ENGINE, "-m", "integration.demo", *session.posargs)


@nox.session(venv_backend="none", requires=["engine-cpu"])
def tests(session: nox.Session) -> None:
    """All tests, those with a real engine last. `-- ARGS` go to pytest."""
    _run(session, "engine-cpu", "-m", "pytest", *session.posargs)


@nox.session(venv_backend="none", requires=["engine-cpu"])
def bench(session: nox.Session) -> None:
    """Measure against the project's goals; prints a table, writes JSON."""
    _run(session, "engine-cpu", "-m", "integration.bench", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff (rules and format) and mypy --strict."""
    session.install(*LINTERS)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", *TYPED)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into site/; `-- --write` first writes the settings page from the code."""
    session.install("mkdocs-material==9.8.1", "-e", "./packages/flexkv")
    session.run("python", "docs/settings_page.py", "--write" if session.posargs else "--check")
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--strict", "--quiet", "-f", "docs/mkdocs.yml", env=quiet)


def _install_engine(session: nox.Session, flavor: str) -> None:
    """Install vLLM, our packages and the tools, unless exactly that is there already."""
    try:
        preflight.check_platform()
        cxx = preflight.find_cxx()
    except preflight.PreflightError as error:
        session.error(str(error))
    stamp = pathlib.Path(session.virtualenv.location, "flexkv-installed")
    inputs = _digest_of_inputs(flavor)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == inputs:
        session.log("Engine and packages are installed already.")
        return
    stamp.unlink(missing_ok=True)
    session.install("packaging")
    session.run("python", "integration/harness/install_vllm.py", VLLM_VERSION, "--flavor", flavor)
    session.install(*TOOLS)
    session.install(*PACKAGES, env={"CXX": cxx})
    stamp.write_text(inputs, encoding="utf-8")


def _digest_of_inputs(flavor: str) -> str:
    """Digest of every file whose change makes the environment stale.

    Python code is installed editable, the kernels are compiled: of the former only the metadata
    counts, of the latter everything.
    """
    files = [ROOT / "noxfile.py", ROOT / "integration/harness/install_vllm.py"]
    files += sorted((ROOT / "packages").glob("*/pyproject.toml"))
    kernels = ROOT / "kernels"
    files += [kernels / "pyproject.toml", kernels / "CMakeLists.txt"]
    for folder in ("include", "src", "python"):
        files += sorted(path for path in (kernels / folder).rglob("*") if path.suffix != ".pyc")
    digest = hashlib.blake2b(flavor.encode())
    for path in files:
        if path.is_file():
            digest.update(f"\0{path.relative_to(ROOT)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _run(session: nox.Session, engine: str, *command: str) -> None:
    """Run the Python of an engine environment."""
    python = session.cache_dir.parent / engine / "bin" / "python"
    session.run(str(python), *command, external=True)
