# SPDX-License-Identifier: Apache-2.0
"""The sources of settings: the engine or the program, a file, the environment.

Precedence, highest first: the engine's own command line or the program's mapping, the file named
by `FLEXKV_CONFIG_PATH`, the environment, the default. An unknown key is an error that names the
nearest known one, but for names of Tencent's FlexKV; see `tencents_names`.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from flexkv.settings.config import SETTINGS, CacheConfig, values_of
from flexkv.settings.setting import Given, shorten, show
from flexkv.settings.settings_file import CONFIG_PATH_VARIABLE, read_file
from flexkv.settings.tencents_names import is_ignored
from flexkv.types.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "FLEXKV_"
"""A variable with this prefix, in upper or lower case, that is no setting is an error."""

_logged: set[str] = set()
"""Ignored names that the log has; a process reads the settings more than once."""

_MOST_COMPARED = 100
"""Characters of an unknown name that are compared with the known ones."""

_INJECTED = re.compile(
    r"FLEXKV_([A-Z0-9_]+_)?"
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables that Kubernetes sets in every pod for a Service named `flexkv` or `flexkv-...`, see
https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables."""


def load_config(
    extra: Mapping[str, object] | None = None,
    extra_source: str = "load_config",
    environ: Mapping[str, str] | None = None,
) -> CacheConfig:
    """Read all sources and return the settings in force. May block as long as the file system of
    the settings' file does.

    Args:
        extra: settings from the engine's own command line, by name; they win over all others. None
            as a value counts as not set. Errors call them `extra_source`.
        environ: `os.environ` if None. Empty variables count as not set.

    Raises ConfigError if a key is unknown, a value is malformed or out of range, a setting lacks
    one that it needs, or the file named by `FLEXKV_CONFIG_PATH` cannot be read. The error names
    value, source and what is allowed.
    """
    environ = os.environ if environ is None else environ
    ignored: list[str] = []
    given = _from_environment(environ, ignored)
    path = environ.get(CONFIG_PATH_VARIABLE)
    if path:
        given |= _from_mapping(read_file(path), f"file {path} ({CONFIG_PATH_VARIABLE})", ignored)
    given |= _from_mapping(extra or {}, extra_source, ignored)
    values = values_of(given)
    _report(ignored)
    return CacheConfig(**values)


def configure_logging(config: CacheConfig, environ: Mapping[str, str] | None = None) -> None:
    """Set the level of the logger `flexkv` and those below it to `log_level`. Log the variables
    that look like settings but that Kubernetes set for a Service.

    If the logger has no handler, it gets one that writes to standard error, and its messages no
    longer reach the root logger.
    """
    flexkv = logging.getLogger("flexkv")
    level = logging.CRITICAL + 1 if config.log_level == "OFF" else config.log_level
    flexkv.setLevel(level)
    if not flexkv.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [FlexKV] %(message)s"))
        flexkv.addHandler(handler)
        flexkv.propagate = False
    environ = os.environ if environ is None else environ
    ignored = sorted(
        name
        for name, text in environ.items()
        if _is_injected(name, text) and not is_ignored(_setting_of(name), "", "the environment")
    )
    if ignored:
        logger.info(
            "%d environment variables set by Kubernetes for a Service are not settings; ignored: "
            "%s",
            len(ignored),
            shorten(", ".join(ignored)),
        )


def _from_environment(environ: Mapping[str, str], ignored: list[str]) -> dict[str, Given]:
    variables = {each.variable: each for each in SETTINGS.values()}
    known = {CONFIG_PATH_VARIABLE, *variables}
    given: dict[str, Given] = {}
    for name, text in environ.items():
        if name in variables and text and not _is_injected(name, text):
            setting, source = variables[name], f"environment variable {name}"
            given[setting.name] = setting.given(text, source)
        elif name in known or not name.upper().startswith(PREFIX):
            continue
        elif is_ignored(_setting_of(name), text, f"environment variable {name}"):
            ignored.append(name)
        elif not _is_injected(name, text):
            raise ConfigError(f"unknown environment variable {shorten(name)}{_known(name, known)}")
    return given


def _from_mapping(
    mapping: Mapping[Any, object], source: str, ignored: list[str]
) -> dict[str, Given]:
    given: dict[str, Given] = {}
    for key, value in mapping.items():
        if isinstance(key, str) and key not in SETTINGS and is_ignored(key, value, source):
            ignored.append(key)
        elif key not in SETTINGS:
            name = key if isinstance(key, str) else show(key)
            raise ConfigError(f"unknown key {show(key)} in {source}{_known(name, SETTINGS)}")
        elif value is not None:
            given[key] = SETTINGS[key].given(value, f"key {key!r} in {source}")
    return given


def _is_injected(name: str, text: str) -> bool:
    """Whether Kubernetes has set a variable. A Service `flexkv-control` sets `FLEXKV_CONTROL_PORT`,
    a setting's variable, to an address."""
    if not _INJECTED.fullmatch(name):
        return False
    is_setting = any(each.variable == name for each in SETTINGS.values())
    return not is_setting or "://" in text


def _setting_of(variable: str) -> str:
    return variable.removeprefix(PREFIX).lower()


def _report(ignored: Iterable[str]) -> None:
    """Log once a process which names of Tencent's FlexKV were ignored."""
    new = [name for name in ignored if name not in _logged]
    if new:
        _logged.update(new)
        logger.warning(
            "ignored, because they are off or tune Tencent's FlexKV only: %s",
            shorten(", ".join(new)),
        )


def _known(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: a hint at the nearest known one, or all of them if
    none is near.

    Case, the prefix and the order of words do not count: `FLEXKV_ENABLE` is `ENABLE_FLEXKV`.
    """
    by_words = {_words(each): each for each in known}
    close = difflib.get_close_matches(
        _words(name[:_MOST_COMPARED]), list(by_words), n=1, cutoff=0.6
    )
    if close:
        return f" (did you mean {by_words[close[0]]!r}?); allowed: names of settings"
    return f"; allowed: {', '.join(sorted(by_words.values()))}"


def _words(name: str) -> str:
    words = name.lower().replace("-", "_").split("_")
    return "_".join(word for word in words if word != "flexkv")
