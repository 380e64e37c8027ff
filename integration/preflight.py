# SPDX-License-Identifier: Apache-2.0
"""What must be true of a machine before anything long starts: checked first, in a second.

Standard library only: the noxfile imports this before any package is installed.
"""

from __future__ import annotations

import os
import pathlib
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping

MIN_PYTHON = (3, 11)
COMPILER_NAMES = ("c++", "g++", "clang++")

# Uses what the kernels use of C++20 and that older compilers lack; compiled, never run.
_PROBE = """\
#include <atomic>
#include <concepts>
#include <span>
#include <thread>
template <std::integral T> T sum(std::span<const T> values) {
    T total{};
    for (T value : values) total += value;
    return total;
}
int main() {
    const int values[] = {1, 2};
    std::atomic<int> flag{0};
    std::jthread waiter([&] { flag.wait(0); });
    flag = 1;
    flag.notify_all();
    return sum<int>(values) - 3;
}
"""


class PreflightError(Exception):
    """The machine lacks something; the message says what, what is allowed and how to get it."""


def check_platform() -> None:
    """Raise PreflightError unless this is Linux with a supported Python."""
    if sys.platform != "linux":
        raise PreflightError(
            f"FlexKV runs on Linux; this is {platform.system()} (allowed: Linux, for example in "
            "WSL 2 or a container)."
        )
    if sys.version_info < MIN_PYTHON:
        need = ".".join(map(str, MIN_PYTHON))
        raise PreflightError(
            f"FlexKV needs Python {need} or newer; nox runs with Python "
            f"{platform.python_version()} ({sys.executable}). Install nox with a newer one: "
            f"python{need} -m pip install nox && python{need} -m nox -s demo"
        )


def check_headers(folder: str = sysconfig.get_path("include")) -> None:
    """Raise PreflightError unless `folder` has Python's headers, which the kernels include."""
    if not pathlib.Path(folder, "Python.h").is_file():
        version = ".".join(map(str, sys.version_info[:2]))
        raise PreflightError(
            f"FlexKV compiles its eviction policy and found no Python.h of Python {version}.\n"
            f"  looked in:  {folder}\n"
            "  to get it:  apt-get install python3-dev | dnf install python3-devel | "
            "apk add python3-dev\n"
            "  then run the same command again"
        )


def find_cxx(environ: Mapping[str, str] | None = None) -> str:
    """Return the command of a C++20 compiler that works, by compiling a small program.

    Args:
        environ: the environment; `os.environ` if None. `CXX`, if set there, is the only candidate.

    Raises:
        PreflightError: none works. Names every command tried and why it was turned down.
    """
    environ = os.environ if environ is None else environ
    chosen = environ.get("CXX", "").strip()
    tried: list[str] = [] if chosen else ["$CXX (not set)"]
    for name in (chosen,) if chosen else COMPILER_NAMES:
        label = f"{name} (from $CXX)" if chosen else name
        problem = _try_compiler(name, environ)
        if problem is None:
            return name
        tried.append(f"{label}: {problem}")
    raise PreflightError(
        "FlexKV compiles its copy kernels and found no C++20 compiler that works.\n"
        f"  looked for: {'; '.join(tried)}\n"
        "  allowed:    GCC 11 or newer, Clang 14 or newer; $CXX names another one\n"
        "  to get one: apt-get install g++ | dnf install gcc-c++ | apk add g++ | "
        "conda install -c conda-forge gxx\n"
        "  then run the same command again"
    )


def _try_compiler(name: str, environ: Mapping[str, str]) -> str | None:
    """Return None if the command compiles and links the probe, else the reason in one line."""
    command = name.split()
    if shutil.which(command[0], path=environ.get("PATH")) is None:
        return "not found"
    with tempfile.TemporaryDirectory(prefix="flexkv-preflight-") as folder:
        source = pathlib.Path(folder, "probe.cpp")
        source.write_text(_PROBE, encoding="utf-8")
        target = str(source.with_suffix(""))
        try:
            result = subprocess.run(
                [*command, "-std=c++20", "-pthread", str(source), "-o", target],
                capture_output=True,
                text=True,
                errors="replace",
                env=dict(environ),
                timeout=600,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"cannot be run: {error}"
    if result.returncode == 0:
        return None
    lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
    return "cannot compile C++20: " + next((line for line in lines if "error" in line), lines[0])


def has_nvidia_gpu() -> bool:
    """Whether nvidia-smi is there and lists a GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    try:
        result = subprocess.run(
            [command, "-L"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0 and "GPU" in result.stdout
