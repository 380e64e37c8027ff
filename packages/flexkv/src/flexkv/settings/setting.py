# SPDX-License-Identifier: Apache-2.0
"""Declares a setting: its kind of values, its default, its text, and the setting that it needs."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from flexkv.types.errors import ConfigError

_MOST_SHOWN = 100
"""Characters of a value that an error prints."""

_SECRETS = re.compile(r"(?<=://)[^/@\s]*(?=@)|(?<=[?#])[^\s'\"]+")
"""Parts of a URL that may be a password or a signature: no error repeats them."""

Value = TypeVar("Value")
Value_co = TypeVar("Value_co", covariant=True)


@dataclass(frozen=True, slots=True)
class ValueKind(Generic[Value_co]):
    """A kind of values. Error messages and the settings page show `unit` and `allowed`.

    Attributes:
        parse: parses a value of a JSON or YAML file, or a string of any source. Raises ValueError
            without a message if the value is not allowed.
        written: writes a value as a user would, so that `parse` reads it again.
        shows_place: whether a value names a place of the user's, such as a path. Metrics and
            reports may have other readers, and leave such values out.
    """

    unit: str
    allowed: str
    parse: Callable[[object], Value_co]
    written: Callable[[Any], str] = str
    shows_place: bool = False


class Given(NamedTuple):
    """A value that a source gives a setting: as the user wrote it, and as it was read."""

    value: object
    source: str
    read: Any


class ReadBy(enum.Enum):
    """The part of FlexKV that a setting concerns."""

    CACHE = enum.auto()
    """The cache and its tiers. With `service`, the service's own settings count."""
    ENGINE = enum.auto()
    """An engine's requests, steps and copies. A service and a program have no use for it."""
    ALL = enum.auto()
    """Every process."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting, as its field of `CacheConfig` declares it.

    Attributes:
        help: the effect, for the settings page. `Default: ...` at its end describes a default that
            is worked out at start.
        needs: name of the setting without which this one is an error; empty for none.
        acts_with: name of the setting without which this one has no effect; empty for none.
        variable: of the environment.
    """

    name: str
    kind: ValueKind[Any]
    default: Any
    help: str
    needs: str
    acts_with: str
    read_by: ReadBy
    variable: str

    @property
    def allowed(self) -> str:
        """The allowed values, for error messages and the settings page."""
        return f"{self.kind.allowed}, and {self.needs}" if self.needs else self.kind.allowed

    def read(self, value: object, source: str) -> Any:
        """Parse a value from `source`. Raises a ConfigError that names both if the value is not
        allowed."""
        try:
            return self.kind.parse(value)
        except ValueError:
            raise ConfigError(
                f"{show(value)} from {source} is not a valid {self.name}; allowed: {self.allowed}"
            ) from None

    def given(self, value: object, source: str) -> Given:
        """`read` a value, and keep what an error may have to name."""
        return Given(value, source, self.read(value, source))

    def lacks_needed(self, given: Given) -> ConfigError:
        """The error of a value without the setting that it needs."""
        return ConfigError(
            f"{self.name} is {show(given.value)} from {given.source}, but {self.needs} is not set; "
            f"allowed: both set, or neither"
        )

    def written(self, value: Any) -> str:
        """The value as a user would write it; empty for None, which stands for no value."""
        return "" if value is None else self.kind.written(value)


def setting(
    kind: ValueKind[Value],
    default: Value,
    help: str,
    *,
    needs: str = "",
    acts_with: str = "",
    read_by: ReadBy = ReadBy.CACHE,
    variable: str = "",
) -> Value:
    """Declare a field of the settings; see `Setting`. Without `variable`, the variable is `FLEXKV_`
    and the name in upper case. mypy compares kind, default and annotation."""
    about = {"kind": kind, "help": help, "needs": needs, "acts_with": acts_with}
    about |= {"read_by": read_by, "variable": variable}
    return dataclasses.field(default=default, metadata=about)


def declared(config: type) -> dict[str, Setting]:
    """The settings that the dataclass `config` declares, by name, in the order of its fields."""
    found = {}
    for each in dataclasses.fields(config):
        about = dict(each.metadata)
        about["variable"] = about["variable"] or f"FLEXKV_{each.name.upper()}"
        found[each.name] = Setting(each.name, default=each.default, **about)
    return found


def show(value: object) -> str:
    """A value as errors print it: on one line, shortened, without secrets."""
    try:
        return shorten(_SECRETS.sub("***", repr(value)))
    except (ValueError, RecursionError):  # an int of thousands of digits, or deep nesting
        return f"a {type(value).__name__} too large to print"


def shorten(text: str) -> str:
    """`text`, or its first characters and its length."""
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"
