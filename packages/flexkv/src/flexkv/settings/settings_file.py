# SPDX-License-Identifier: Apache-2.0
"""Reads the YAML or JSON file of settings."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import yaml

from flexkv.settings.setting import shorten, show
from flexkv.types.errors import ConfigError

CONFIG_PATH_VARIABLE = "FLEXKV_CONFIG_PATH"
"""The environment variable with the path of the settings' file."""

MOST_FILE_BYTES = 1 << 20
"""The largest file that is read. All settings together take some KiB."""
_MOST_ALIASED = 256
"""The most characters that an alias may stand for. The largest file then becomes 90 MB of text."""
_ALLOWED_FILE = f"a YAML or JSON file of at most {MOST_FILE_BYTES >> 20} MiB, one mapping"

_PARSE_ERRORS = (
    yaml.YAMLError,
    ValueError,
    RecursionError,
    # PyYAML on a value that does not fit its tag, such as `!!int ""`.
    LookupError,
    AttributeError,
    ArithmeticError,
)


def read_file(path: str, named_by: str = CONFIG_PATH_VARIABLE) -> Mapping[Any, object]:
    """The mapping in a file; empty if the file sets nothing. Raises ConfigError, which says what
    names the file, if the file cannot be read or parsed, or holds no mapping."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot read {path} from {named_by}: {reason}; allowed: {_ALLOWED_FILE}"
        ) from None
    try:
        content = _parse_json(text) if path.endswith(".json") else _parse_yaml(text)
    except _PARSE_ERRORS as error:
        detail = shorten(" ".join(str(error).split()))
        raise ConfigError(
            f"{path} from {named_by} cannot be parsed: {detail}; allowed: {_ALLOWED_FILE}"
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} from {named_by} holds a {type(content).__name__}; allowed: {_ALLOWED_FILE}"
        )
    return content


def read_text(path: str) -> str:
    """The text of a regular file: opening a FIFO would wait for a writer, and a device may never
    end. Raises OSError, also if the file is too large, and ValueError if it is not UTF-8, or `path`
    is not a path."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file")
        data = file.read(MOST_FILE_BYTES + 1)
    if len(data) > MOST_FILE_BYTES:
        raise OSError(errno.EFBIG, f"larger than {MOST_FILE_BYTES} bytes")
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

    Refuses an alias of a list or mapping, too, and of a long text: a few lines of them, each of the
    line before, are a value that no memory has room for once it is printed.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        short = isinstance(node, yaml.ScalarNode) and len(node.value) <= _MOST_ALIASED
        if alias and not short:
            raise ValueError("an alias stands for a list, a mapping or a long text")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, object]:
        self.flatten_mapping(node)
        pairs = []
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise ValueError(f"{show(key)} cannot be a key")
            pairs.append((key, self.construct_object(value_node, deep=deep)))
        return _without_duplicates(pairs)
