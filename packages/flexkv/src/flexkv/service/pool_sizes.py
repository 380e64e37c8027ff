# SPDX-License-Identifier: Apache-2.0
"""The sizes of pools and the shares of their tenants, from the file of `flexkv serve --pools`, and
what is left for others."""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from flexkv.service.messages import MOST_NAME
from flexkv.settings import GIB, SETTINGS, CacheConfig
from flexkv.settings.setting import show
from flexkv.settings.settings_file import read_file
from flexkv.types.errors import ConfigError
from flexkv.types.texts import exact

MEMORY, DISK, SHARES = "cpu_cache_gb", "ssd_cache_gb", "tenant_shares"
_SIZES = (MEMORY, DISK)

Shares: TypeAlias = tuple[tuple[str, float], ...]
"""See the setting `tenant_shares`."""


class NoRoomError(Exception):
    """Other pools have all of the memory that the file names. The text is a sentence."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Memory and disk, in GiB, and how tenants share the memory. `memory` is None for the default
    of `cpu_cache_gb`, `disk` for no disk; of a total, None is no limit."""

    memory: float | None = None
    disk: float | None = None
    shares: Shares = ()

    def applied(self, config: CacheConfig) -> CacheConfig:
        """The settings of a service with these sizes."""
        folders = config.ssd_cache_dir if self.disk else ()
        return replace(
            config,
            cpu_cache_gb=self.memory,
            ssd_cache_gb=self.disk or None,
            ssd_cache_dir=folders,
            tenant_shares=self.shares,
        )


@dataclass(frozen=True, slots=True)
class PoolFile:
    """What the file says: `other` for a pool that no entry names, `named` for the pool of a model
    by the name that engines serve it by, and `total` for all together. Without a file, whose path
    is empty, each pool has the sizes of the settings."""

    path: str
    other: PoolSize
    named: Mapping[str, PoolSize] = field(default_factory=dict)
    total: PoolSize = PoolSize()


@dataclass(slots=True)
class _Taken:
    """What one pool has, and the entry that it has; None for a pool that no entry names."""

    size: PoolSize
    entry: str | None


class PoolSizes:
    """The sizes of the pools that there are, and of the next one."""

    def __init__(self, file: PoolFile) -> None:
        self._file = file
        self._taken: dict[Hashable, _Taken] = {}

    def take(self, pool: Hashable, model: str, slot_bytes: int) -> PoolSize:
        """The size of a pool that is about to be made, until `give_back`, for the model that its
        first engine serves. Raises NoRoomError if the total leaves no room for one block."""
        taken = self._plan(model)
        total = self._file.total.memory
        # Less than a block without a total is an error of the size, which the arena names.
        if total is not None and taken.entry is None and not _holds(taken.size.memory, slot_bytes):
            raise NoRoomError(
                f"other pools have all {exact(total)} GiB of "
                f"total.{MEMORY} in {self._file.path}; allowed: an entry for "
                f"the model {model!r}, or to end the engines of another that has none"
            )
        if not _holds(taken.size.disk, slot_bytes):
            taken.size = replace(taken.size, disk=None)
        self._taken[pool] = taken
        return taken.size

    def resume(self, pool: Hashable, model: str, memory: float) -> tuple[PoolSize, float | None]:
        """The size of a pool that engines hand back, until `give_back`: it keeps its memory, in
        GiB. Returns also the memory that a new pool would get; None for the default."""
        taken = self._plan(model)
        planned = taken.size.memory
        taken.size = replace(taken.size, memory=memory)
        self._taken[pool] = taken
        return taken.size, planned

    def give_back(self, pool: Hashable) -> None:
        """A pool has ended, or was not made. Idempotent."""
        self._taken.pop(pool, None)

    def is_named(self, pool: Hashable) -> bool:
        """Whether a pool has an entry of its own."""
        return pool in self._taken and self._taken[pool].entry is not None

    def _plan(self, model: str) -> _Taken:
        used = {each.entry for each in self._taken.values()}
        if model in self._file.named and model not in used:
            return _Taken(self._file.named[model], model)
        other = self._file.other
        memory, disk = self._least(other, "memory"), self._least(other, "disk")
        return _Taken(PoolSize(memory, disk, other.shares), None)

    def _least(self, wanted: PoolSize, what: str) -> float | None:
        """What a pool without an entry gets: what it wants, or what is left."""
        size: float | None = getattr(wanted, what)
        total: float | None = getattr(self._file.total, what)
        if total is None:
            return size
        others = [each.size for each in self._taken.values() if each.entry is None]
        # Kept for the models that entries name, whether their engines run or not.
        kept = [*self._file.named.values(), *others]
        left = max(0.0, total - sum(getattr(each, what) or 0.0 for each in kept))
        if size is None and what == "disk":
            return None
        return left if size is None else min(size, left)


def _holds(size: float | None, slot_bytes: int) -> bool:
    """Whether a size, which None does not bound, has room for a block."""
    return size is None or size * GIB >= slot_bytes


def sizes_of_settings(config: CacheConfig) -> PoolFile:
    """The sizes without a file: those of the settings, for each pool."""
    size = PoolSize(config.cpu_cache_gb, config.ssd_cache_gb, config.tenant_shares)
    return PoolFile("", size)


def read_pools(path: str, config: CacheConfig) -> PoolFile:
    """Read the sizes of pools. Those that the file does not name are those of the settings. Raises
    ConfigError if the file cannot be read, or has a key or a value that is not allowed."""
    path = os.path.abspath(path)
    reader = _Reader(path, config)
    content = read_file(path, "--pools")
    reader.check_keys(content, ("total", "pools", "default"), "")
    settings = sizes_of_settings(config).other
    other = reader.sizes(content.get("default"), "default", settings, (SHARES,))
    total = reader.sizes(content.get("total"), "total", PoolSize())
    entries = content.get("pools")
    if not isinstance(entries, list | None):
        raise reader.wrong(entries, "pools", "a list of entries")
    named: dict[str, PoolSize] = {}
    for number, entry in enumerate(entries or ()):
        where = f"pools[{number}]"
        model = reader.model(entry, where)
        if model in named:
            raise reader.wrong(model, f"{where}.model", "each model once")
        named[model] = reader.sizes(entry, where, other, ("model", SHARES))
    made = PoolFile(path, other, named, total)
    reader.check_total(made)
    return made


class _Reader:
    """Reads parts of the file, and refuses what is not allowed."""

    def __init__(self, path: str, config: CacheConfig) -> None:
        self._path = path
        self._config = config

    def wrong(self, value: object, where: str, allowed: str) -> ConfigError:
        """The error of a value."""
        return ConfigError(
            f"{show(value)} from {where} in {self._path} is not allowed; allowed: {allowed}"
        )

    def check_keys(self, mapping: Mapping[Any, object], known: Collection[str], where: str) -> None:
        """Refuse keys that are not known."""
        for key in mapping:
            if key not in known:
                place = f" of {where}" if where else ""
                raise ConfigError(
                    f"unknown key {show(key)}{place} in {self._path}; allowed: {', '.join(known)}"
                )

    def model(self, entry: object, where: str) -> str:
        """The name of an entry's model."""
        if not isinstance(entry, dict):
            raise self.wrong(entry, where, "a mapping with model and sizes")
        name = entry.get("model")
        if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:
            allowed = f"the name that engines serve a model by, of 1 to {MOST_NAME} characters"
            raise self.wrong(name, f"{where}.model", allowed)
        return name

    def sizes(
        self, entry: object, where: str, other: PoolSize, more: Collection[str] = ()
    ) -> PoolSize:
        """The sizes and the shares of an entry; those that it lacks are those of `other`."""
        if entry is None:
            return other
        if not isinstance(entry, dict):
            raise self.wrong(entry, where, f"a mapping with {' and '.join(_SIZES)}")
        self.check_keys(entry, (*more, *_SIZES), where)
        read: dict[str, Any] = {}
        for name in (*_SIZES, SHARES):
            if entry.get(name) is not None:
                read[name] = SETTINGS[name].read(entry[name], f"{where}.{name} in {self._path}")
        if read.get(DISK) and not self._config.ssd_cache_dir:
            raise ConfigError(
                f"{where}.{DISK} is {entry[DISK]} in {self._path}, but ssd_cache_dir is not set; "
                f"allowed: both, or neither"
            )
        return PoolSize(
            read.get(MEMORY, other.memory),
            read.get(DISK, other.disk),
            read.get(SHARES, other.shares),
        )

    def check_total(self, made: PoolFile) -> None:
        """Refuse entries that need more than the total, or have no size where it has one."""
        for what, name in (("memory", MEMORY), ("disk", DISK)):
            total: float | None = getattr(made.total, what)
            if total is None:
                continue
            sizes = {model: getattr(size, what) for model, size in made.named.items()}
            lacks = next((model for model, size in sizes.items() if size is None), None)
            if lacks is not None and what == "memory":
                raise ConfigError(
                    f"the entry of {lacks!r} in {self._path} has no {name}, but total.{name} is "
                    f"set; allowed: {name} in each entry, or in default"
                )
            needed = sum(size or 0.0 for size in sizes.values())
            if needed > total:
                raise ConfigError(
                    f"the entries of pools in {self._path} have {exact(needed)} GiB of {name} "
                    f"together, and total.{name} is {exact(total)}; allowed: no more than the total"
                )
