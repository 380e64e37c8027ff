# SPDX-License-Identifier: Apache-2.0
"""A copy of the tree in which mutants are applied: the checkout itself is never changed."""

from __future__ import annotations

import compileall
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mutants.entries import ROOT, Mutant

_LIBRARY = "libflexkv_kernels.so"
_BUILT_FROM = tuple(f"kernels/{part}" for part in ("CMake", "cmake/", "cuda/", "include/", "src/"))
_IMPORTED_FROM = (
    "packages/flexkv/src",
    "packages/flexkv-vllm/src",
    "packages/flexkv-sglang/src",
    "kernels/python",
)


class BuildError(Exception):
    """The kernels of a copy do not compile."""


class Scratch:
    """A copy of the files that git tracks or would track, and the kernels built from them.

    tree: the root of the copy. temporary: a folder for the tests' files.
    """

    def __init__(self, folder: Path, *, builds: bool) -> None:
        """Copies the tree into `folder`, which must not exist.

        builds: whether the kernels are compiled from the copy, for mutants of their sources;
        otherwise the copy gets the installed library.
        """
        self.tree = folder / "tree"
        self.temporary = folder / "t"
        self._build_folder = folder / "build"
        self._cache = folder / "cache"
        self._stale = builds
        for name in _files(ROOT):
            target = self.tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        if not builds:
            shutil.copy2(_installed_library(), self._library)
        for sources in _IMPORTED_FROM:
            compileall.compile_dir(self.tree / sources, quiet=1)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a Python that imports the packages of the copy."""
        paths = [str(self.tree), *(str(self.tree / path) for path in _IMPORTED_FROM)]
        return {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "FAKE_CUDA_CACHE": str(self._cache),
            # A module is compiled from what its file holds now: files that are changed within one
            # second differ in nothing that Python compares.
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    @contextmanager
    def with_fault(self, mutant: Mutant | None) -> Iterator[None]:
        """Applies the mutant, or nothing; builds what is stale; undoes the mutant in the end.

        Raises ValueError if the mutant does not fit its file, BuildError if it does not compile.
        """
        if mutant is None:
            self._build()
            yield
            return
        path = self.tree / mutant.file
        original = path.read_text(encoding="utf-8")
        self._write(path, mutant.apply(original))
        try:
            self._build()
            yield
        finally:
            self._write(path, original)

    @property
    def _library(self) -> Path:
        return self.tree / "kernels/python/flexkv_kernels" / _LIBRARY

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".py":
            Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
        if is_built(path.relative_to(self.tree).as_posix()):
            self._stale = True

    def _build(self) -> None:
        """Builds the kernels if their sources have changed; unchanged objects are kept."""
        if not self._stale:
            return
        folder = str(self._build_folder)
        if not self._build_folder.is_dir():
            source = str(self.tree / "kernels")
            _run("cmake", "-S", source, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release")
        _run("cmake", "--build", folder)
        # A new file: a process may have the old one in memory.
        fresh = self._library.with_suffix(".new")
        shutil.copy2(self._build_folder / _LIBRARY, fresh)
        fresh.replace(self._library)
        self._stale = False


def is_built(file: str) -> bool:
    """Whether a change of `file` takes a new build of the kernels."""
    return file.startswith(_BUILT_FROM)


def _files(root: Path) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [name for name in listed.split("\0") if name and (root / name).is_file()]


def _installed_library() -> Path:
    spec = importlib.util.find_spec("flexkv_kernels")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (library := Path(folder, _LIBRARY)).is_file():
            return library
    raise BuildError("flexkv-kernels is not installed: `pip install ./kernels`")


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BuildError(f"{command[0]} is not installed; kernels need cmake and ninja") from error
    if done.returncode != 0:
        raise BuildError((done.stdout + done.stderr).strip())
