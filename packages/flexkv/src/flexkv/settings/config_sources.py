# SPDX-License-Identifier: Apache-2.0
"""The sources of settings: the engine, a file, the environment.

Precedence, highest first: the engine's own command line (for vLLM
`kv_connector_extra_config`), the file named by `FLEXKV_CONFIG_PATH`, the environment, the
default. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import json
import logging
import os
import re
import stat
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import yaml

from flexkv.errors import ConfigError
from flexkv.settings.config import CacheConfig, settings

logger = logging.getLogger(__name__)

CONFIG_PATH_VARIABLE = "FLEXKV_CONFIG_PATH"
"""The environment variable with the path of the settings' file."""
PREFIX = "FLEXKV_"
"""A variable with this prefix, in upper or lower case, that is no setting is an error."""

_MOST_FILE_BYTES = 1 << 20
"""The largest file that is read. All settings together take some KiB."""
_MOST_SHOWN = 100
"""Characters of a value that an error prints."""
_ALLOWED_FILE = f"a YAML or JSON file of at most {_MOST_FILE_BYTES >> 20} MiB, one mapping"

_PARSE_ERRORS = (
    yaml.YAMLError,
    ValueError,
    RecursionError,
    # PyYAML on a value that does not fit its tag, such as `!!int ""`.
    LookupError,
    AttributeError,
    ArithmeticError,
)

_SECRETS = re.compile(r"(?<=://)[^/@\s]*(?=@)|(?<=[?#])[^\s'\"]+")
"""Parts of a URL that may be a password or a signature: no error repeats them."""

_INJECTED = re.compile(
    r"FLEXKV_([A-Z0-9_]+_)?"
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables that Kubernetes sets in every pod for a Service named `flexkv` or `flexkv-...`, see
https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables."""


def load_config(
    extra: Mapping[str, object] | None = None,
    extra_source: str = "kv_connector_extra_config",
    environ: Mapping[str, str] | None = None,
) -> CacheConfig:
    """Read all sources and return the settings in force.

    May block as long as the file system of the settings' file does.

    Args:
        extra: settings from the engine's own command line, by name; they win over all others. None
            as a value counts as not set.
        extra_source: the name of `extra` in errors.
        environ: the environment; `os.environ` if None. Empty variables count as not set.

    Raises:
        ConfigError: a key is unknown, a value is malformed or out of range, a setting lacks the one
            that it needs, or the file named by `FLEXKV_CONFIG_PATH` cannot be read. The error names
            value, source and what is allowed.
    """
    environ = os.environ if environ is None else environ
    values = _from_environment(environ)
    path = environ.get(CONFIG_PATH_VARIABLE)
    if path:
        source = f"file {path} ({CONFIG_PATH_VARIABLE})"
        values |= _from_mapping(_read_file(path), source)
    values |= _from_mapping(extra or {}, extra_source)
    config = CacheConfig(**values)
    if (config.ssd_cache_gb is None) != (not config.ssd_cache_dir):
        raise ConfigError(
            f"ssd_cache_gb is {config.ssd_cache_gb!r} and ssd_cache_dir is "
            f"{';'.join(config.ssd_cache_dir)!r}; allowed: both set, or neither"
        )
    if (config.mooncake_master is None) != (config.mooncake_metadata is None):
        raise ConfigError(
            f"mooncake_master is {config.mooncake_master!r} and mooncake_metadata is "
            f"{config.mooncake_metadata!r}; allowed: both set, or neither"
        )
    return config


def log_ignored_variables(environ: Mapping[str, str] | None = None) -> None:
    """Log the variables that look like settings but that Kubernetes set for a Service.

    Args:
        environ: the environment; `os.environ` if None.
    """
    environ = os.environ if environ is None else environ
    ignored = sorted(name for name in environ if _INJECTED.fullmatch(name))
    if ignored:
        logger.info(
            "%d environment variables set by Kubernetes for a Service are not settings; ignored: "
            "%s",
            len(ignored),
            _shorten(", ".join(ignored)),
        )


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    variables = {setting.metadata["env"]: setting for setting in settings()}
    known = {CONFIG_PATH_VARIABLE, *variables}
    values = {}
    for name, setting in variables.items():
        text = environ.get(name)
        if text is not None and text != "":
            values[setting.name] = _parse(setting, text, f"environment variable {name}")
    for name in environ:
        if name.upper().startswith(PREFIX) and name not in known and not _INJECTED.fullmatch(name):
            raise ConfigError(
                f"unknown environment variable {_shorten(name)}{_nearest(name, known)}; "
                f"allowed: {', '.join(sorted(known))}"
            )
    return values


def _from_mapping(mapping: Mapping[Any, object], source: str) -> dict[str, Any]:
    by_name = {setting.name: setting for setting in settings()}
    values = {}
    for key, value in mapping.items():
        if key not in by_name:
            name = key if isinstance(key, str) else _show(key)
            raise ConfigError(
                f"unknown key {_show(key)} in {source}{_nearest(name, by_name)}; "
                f"allowed: {', '.join(sorted(by_name))}"
            )
        if value is not None:
            values[key] = _parse(by_name[key], value, f"key {key!r} in {source}")
    return values


def _parse(setting: dataclasses.Field[Any], value: object, source: str) -> Any:
    try:
        return setting.metadata["parse"](value)
    except ValueError:
        raise ConfigError(
            f"{_show(value)} from {source} is not a valid {setting.name}; "
            f"allowed: {setting.metadata['allowed']}"
        ) from None


def _nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the nearest known name; empty if none is near.

    Case, the prefix and the order of words do not count: `FLEXKV_ENABLE` is `ENABLE_FLEXKV`.
    """
    by_words = {_words(each): each for each in known}
    close = difflib.get_close_matches(_words(name[:_MOST_SHOWN]), list(by_words), n=1, cutoff=0.6)
    return f" (did you mean {by_words[close[0]]!r}?)" if close else ""


def _words(name: str) -> str:
    words = name.lower().replace("-", "_").split("_")
    return "_".join(word for word in words if word != "flexkv")


def _show(value: object) -> str:
    """A value as errors print it."""
    try:
        return _shorten(_SECRETS.sub("***", repr(value)))
    except (ValueError, RecursionError):  # an int of thousands of digits, or deep nesting
        return f"a {type(value).__name__} too large to print"


def _shorten(text: str) -> str:
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def _read_file(path: str) -> Mapping[Any, object]:
    try:
        text = _read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {path} from {CONFIG_PATH_VARIABLE}: {error}; allowed: {_ALLOWED_FILE}"
        ) from None
    try:
        content = _parse_json(text) if path.endswith(".json") else _parse_yaml(text)
    except _PARSE_ERRORS as error:
        detail = _shorten(" ".join(str(error).split()))
        raise ConfigError(
            f"{path} from {CONFIG_PATH_VARIABLE} cannot be parsed: {detail}; "
            f"allowed: {_ALLOWED_FILE}"
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} from {CONFIG_PATH_VARIABLE} holds a {type(content).__name__}; "
            f"allowed: {_ALLOWED_FILE}"
        )
    return content


def _read_text(path: str) -> str:
    """The text of a regular file.

    Opening a FIFO would wait for a writer, and a device may never end.

    Raises:
        OSError: the file cannot be read, is not a regular file or is too large.
        ValueError: the file is not UTF-8, or `path` is not a path.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file")
        data = file.read(_MOST_FILE_BYTES + 1)
    if len(data) > _MOST_FILE_BYTES:
        raise OSError(errno.EFBIG, f"larger than {_MOST_FILE_BYTES} bytes")
    return data.decode("utf-8")


def _parse_json(text: str) -> object:
    return json.loads(text, object_pairs_hook=_without_duplicates)


def _parse_yaml(text: str) -> object:
    return yaml.load(text, _UniqueKeysLoader)


def _without_duplicates(pairs: Iterable[tuple[Hashable, object]]) -> dict[Any, object]:
    mapping: dict[Any, object] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"duplicate key {key!r}")
        mapping[key] = value
    return mapping


class _UniqueKeysLoader(yaml.SafeLoader):
    """Refuses a mapping with equal keys: YAML forbids them, and PyYAML takes the last.

    Refuses an alias of a list or mapping, too: a few lines of them, each of the line before, are a
    value that no memory has room for once it is printed.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if alias and not isinstance(node, yaml.ScalarNode):
            raise ValueError("an alias stands for a list or a mapping")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, object]:
        self.flatten_mapping(node)
        pairs = []
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise ValueError(f"{_show(key)} cannot be a key")
            pairs.append((key, self.construct_object(value_node, deep=deep)))
        return _without_duplicates(pairs)
