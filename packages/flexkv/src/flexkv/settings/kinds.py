# SPDX-License-Identifier: Apache-2.0
"""The kinds of settings' values: for each a function that makes the kind for some bounds.

The file has no setting's name. A kind's parser takes a value from a JSON or YAML file, or a string
from elsewhere. It raises ValueError without a message; `Setting.read` makes the message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import TypeVar

from flexkv.settings.setting import ValueKind
from flexkv.types.tenants import MOST_TENANTS, NAME_CHARACTERS, tenant_number
from flexkv.types.texts import exact

_LEAST_GIB = 1e-6
"""The least size, about 1 KiB. Tests use caches of some KiB."""
_MOST_GIB = float(1 << 20)
"""The largest size, 1 PiB, more than one machine has. A larger number may be meant in bytes."""
_DAY_SECONDS = 86400.0
"""The longest time limit. A larger number may be meant in milliseconds."""

_OTHER_SEPARATOR = re.compile(r"[,:]\s*/")
"""Separators of paths in other programs. A path that contains one is far more often two paths than
a path of that name."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_BUCKET = (
    rf"(?:(?:s3|gs|az)://{_NAME}|abfss?://{_NAME}@{_NAME}|file://(?=/[^/]))"
    r"(?:/(?!\.\.?(?:/|$))[A-Za-z0-9._-]+)*/?"
)

_HOST = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}(?:\.[A-Za-z0-9_-]{1,63})*\.?"
"""Labels of a machine's name have 1 to 63 characters; no resolver takes others."""
_ANY_HOST = rf"(?:{_HOST}|\[[0-9A-Fa-f:.]{{2,45}}\])"
"""A name, an IPv4 address, or an IPv6 address in brackets."""
_HOST_PORT = rf"{_ANY_HOST}:[0-9]{{1,5}}"
_ETCD = rf"etcd://{_HOST_PORT}(?:[;,]{_HOST_PORT})*"
_HTTP_URL = rf"https?://{_ANY_HOST}(?::[0-9]{{1,5}})?(?:/[A-Za-z0-9._-]+)+"
_PORT = re.compile(r":([0-9]{1,5})(?=[;,/]|$)")
_DEVICES = r"(?:[A-Za-z0-9_.-]+(?:,[A-Za-z0-9_.-]+)*)?"

_WORDS = {"1": True, "true": True, "yes": True, "on": True}
_WORDS |= {"0": False, "false": False, "no": False, "off": False}

Number = TypeVar("Number", int, float)


def flag() -> ValueKind[bool]:
    """A boolean: one of the file, 1 or 0, or one of the words for them."""

    def parse(value: object) -> bool:
        word = str(value).strip().lower()
        if word not in _WORDS:
            raise ValueError
        return _WORDS[word]

    allowed = "1, 0, true, false, yes, no, on, off"
    return ValueKind("boolean", allowed, parse, lambda value: str(value).lower())


def number(least: float, most: float, unit: str, limit: str = "") -> ValueKind[float]:
    """A number from `least` to `most`, but never NaN. `limit` is a further bound, in words."""
    return _in_range(float, least, most, unit, "a number", limit)


def count(least: int, most: int, unit: str, limit: str = "") -> ValueKind[int]:
    """A whole number from `least` to `most`. `limit` is a further condition, in words."""
    return _in_range(int, least, most, unit, "a whole number", limit)


def _in_range(  # noqa: PLR0917 - the arguments of `number` and `count`
    of: type[Number], least: Number, most: Number, unit: str, what: str, limit: str
) -> ValueKind[Number]:
    def parse(value: object) -> Number:
        if isinstance(value, bool) or not isinstance(value, (int, str, of)):
            raise ValueError
        if isinstance(value, str) and "_" in value:
            raise ValueError  # Python takes `1_6` for 16, which nobody means who mistypes `1.6`
        try:
            number = of(value)
        except OverflowError:  # an int with hundreds of digits
            raise ValueError from None
        if not least <= number <= most:
            raise ValueError
        return number

    allowed = f"{what} from {exact(least)} to {exact(most)}{limit and f', {limit}'}"
    return ValueKind(unit, allowed, parse, exact)


def gib(least: float = _LEAST_GIB, unit: str = "GiB", limit: str = "") -> ValueKind[float]:
    """A size in GiB; see `number`."""
    return number(least, _MOST_GIB, unit, limit)


def gib_or_none(limit: str) -> ValueKind[float | None]:
    """A size in GiB, or 0 for None; see `number`."""
    size = gib(limit=limit)

    def parse(value: object) -> float | None:
        none = not isinstance(value, bool) and str(value).strip() in ("0", "0.0")
        return None if none else size.parse(value)

    return ValueKind(size.unit, f"0 for none, or {size.allowed}", parse, size.written)


def seconds(least: float) -> ValueKind[float]:
    """A time limit, of a day at most."""
    return number(least, _DAY_SECONDS, "seconds")


def choice(names: Collection[str]) -> ValueKind[str]:
    """One of `names`, written in any case."""
    by_text = {name.lower(): name for name in names}

    def parse(value: object) -> str:
        text = str(value).strip().lower()
        if text not in by_text:
            raise ValueError
        return by_text[text]

    return ValueKind("name", ", ".join(names), parse)


def choices(names: Collection[str]) -> ValueKind[tuple[str, ...]]:
    """Some of `names`, separated by commas or in a list, in the order of `names`. `all` and `none`
    stand for themselves."""

    def parse(value: object) -> tuple[str, ...]:
        wanted = {str(part).strip().lower() for part in _parts(value, ",")}
        if wanted == {"all"}:
            return tuple(names)
        if wanted == {"none"}:
            return ()
        if not wanted <= set(names):
            raise ValueError
        return tuple(name for name in names if name in wanted)

    allowed = f"all, none, or names of {', '.join(names)}"
    return ValueKind("names", allowed, parse, lambda value: ",".join(value) or "none")


def tenant() -> ValueKind[str]:
    """The name of a tenant."""
    return ValueKind("name", _TENANTS, _parse_tenant, shows_place=True)


def shares() -> ValueKind[tuple[tuple[str, float], ...]]:
    """Percentages by names of tenants: a mapping, or a text with `=` and `;`. No two names have the
    same number."""

    def parse(value: object) -> tuple[tuple[str, float], ...]:
        if isinstance(value, Mapping):
            pairs: list[object] = list(value.items())
        else:
            pairs = [
                part.strip().rpartition("=")[::2] if isinstance(part, str) else part
                for part in _parts(value, ";")
            ]
        percent = number(1e-3, 100, "percent").parse
        read = []
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != _PAIR:
                raise ValueError
            read.append((_parse_tenant(pair[0]), percent(pair[1])))
        numbers = {tenant_number(name) for name, _ in read}
        if len(numbers) < len(read) or len(read) > MOST_TENANTS:
            raise ValueError
        if sum(share for _, share in read) > _WHOLE:
            raise ValueError
        return tuple(read)

    def written(value: tuple[tuple[str, float], ...]) -> str:
        return ";".join(f"{name}={exact(share)}" for name, share in value)

    allowed = (
        f"NAME=PERCENT;NAME=PERCENT or a mapping, of up to {MOST_TENANTS} tenants, each once, 100 "
        f"together at most; a name is {_TENANTS}"
    )
    return ValueKind("percent by name", allowed, parse, written, shows_place=True)


_WHOLE = 100 + 1e-9
"""All of the memory, rounded up."""
_PAIR = 2
_TENANTS = (
    f"1 to {NAME_CHARACTERS} printable characters without space, `;` and `,`, `=` only at its end"
)


def _parse_tenant(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= NAME_CHARACTERS:
        raise ValueError
    if not value.isprintable() or set(" ;,") & set(value) or "=" in value.rstrip("="):
        raise ValueError
    return value


def path(of: str) -> ValueKind[str]:
    """An absolute path. Nothing has to exist there. `of` describes what the path leads to."""

    def parse(value: object) -> str:
        read = _parse_path(value)
        read.encode()  # raises a ValueError; processes send each other paths as UTF-8
        return read

    allowed = f"an absolute path, in UTF-8, of {of}"
    return ValueKind("absolute path", allowed, parse, shows_place=True)


def paths() -> ValueKind[tuple[str, ...]]:
    """Absolute paths, separated by `;` or in a list, of which no two are written alike. Whether two
    lead to the same directory is checked at start."""

    def parse(value: object) -> tuple[str, ...]:
        if isinstance(value, str) and _OTHER_SEPARATOR.search(value):
            raise ValueError
        paths = tuple(
            _parse_path(part.strip() if isinstance(part, str) else part)
            for part in _parts(value, ";")
        )
        if len({os.path.normpath(path) for path in paths}) != len(paths):
            raise ValueError
        return paths

    allowed = "absolute paths separated by `;` (not `,` or `:`), none twice"
    return ValueKind("absolute paths", allowed, parse, ";".join, shows_place=True)


def server_or_etcd() -> ValueKind[str]:
    """The address of a server with its port, or the servers of etcd that know the address."""
    allowed = "HOST:PORT, [IPv6]:PORT, or etcd://HOST:PORT;HOST:PORT"
    return _matching("HOST:PORT", allowed, f"{_HOST_PORT}|{_ETCD}")


def http_or_etcd(example: str, word: str) -> ValueKind[str]:
    """The URL of a path on a server, with a port or without, and without credentials; servers of
    etcd; or `word`, in any case."""
    allowed = f"{word}, {example}, the same with https, or etcd://HOST:PORT;HOST:PORT"
    kind = _matching("URL", allowed, f"{_HTTP_URL}|{_ETCD}")

    def parse(value: object) -> str:
        is_word = isinstance(value, str) and value.strip().upper() == word
        return word if is_word else kind.parse(value)

    return ValueKind(kind.unit, kind.allowed, parse)


def bucket_url() -> ValueKind[str]:
    """The URL of a bucket, with a path or without, or of a folder. Trailing slashes are removed.
    Credentials are refused, because they would end up in logs."""
    allowed = (
        "s3://, gs://, az:// or abfss://CONTAINER@HOST, a bucket and a path, or file:///PATH; "
        "without credentials, `?` and `#`"
    )
    return _matching("URL", allowed, _BUCKET)


def devices() -> ValueKind[str]:
    """Names of network devices, separated by commas; empty for the library's own choice."""
    return _matching("names", "names of devices, separated by commas", _DEVICES)


def _matching(unit: str, allowed: str, pattern: str) -> ValueKind[str]:
    """Texts that `pattern` matches, without slashes at the end. Their ports are valid ones."""

    def parse(value: object) -> str:
        found = re.fullmatch(pattern, value) if isinstance(value, str) else None
        if found is None:
            raise ValueError
        if not all(0 < int(port) < 1 << 16 for port in _PORT.findall(found[0])):
            raise ValueError
        return found[0].rstrip("/")

    return ValueKind(unit, allowed, parse)


def _parse_path(value: object) -> str:
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(value, str) or not os.path.isabs(value) or "\0" in value:
        raise ValueError
    return value


def _parts(value: object, separator: str) -> list[object] | tuple[object, ...]:
    if isinstance(value, os.PathLike):
        return [value]
    parts = value.split(separator) if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise ValueError
    return parts
