# SPDX-License-Identifier: Apache-2.0
"""The seam of the stores that engines share: what FlexKV asks of each kind of them.

A new kind changes three files. A module or package `flexkv.tiers.NAME` has a `STORE`, `NAME` is a
member of `Medium`, and the settings have its address and `NAME_admission`, `NAME_question_seconds`,
`NAME_timeout_seconds`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module

from flexkv.settings import CacheConfig, address_setting
from flexkv.tiers.epochs import EpochRecord
from flexkv.tiers.remote import OpenStore, RemoteLimits
from flexkv.types.admission import ADMISSIONS, Admission
from flexkv.types.changes import BELOW, Medium
from flexkv.types.errors import ConfigError


class SharedStore(ABC):
    """A kind of store. All methods but `address` are for settings that name a store of this kind.
    Those that need the store's client import it, and raise ConfigError where it is not installed.

    Args:
        medium: its name in settings, metrics and events. The setting `NAME_admission` acts with
            that of its address.
        client: name of the module that imports the client.
    """

    def __init__(self, medium: Medium, client: str) -> None:
        self.medium = medium
        self.setting = address_setting(medium)
        self._client = client

    @abstractmethod
    def open(
        self, config: CacheConfig, fingerprint: str, slot_bytes: int, queue_bytes: int
    ) -> OpenStore:
        """The store, with the record of a fingerprint's epoch. Sends nothing: `BlockStore.open`
        does. Raises StoreSettingError if it cannot be used as the settings name it."""

    @abstractmethod
    def records(self, config: CacheConfig, fingerprints: Sequence[str]) -> list[EpochRecord]:
        """The record of each fingerprint's epoch, for a process that reads and writes no blocks."""

    @abstractmethod
    def probes(self, config: CacheConfig) -> Iterator[tuple[str, Callable[[], object]]]:
        """The servers of the store, and a call that raises OSError if one does not answer. Joins
        and writes nothing."""

    def fingerprints(self, config: CacheConfig) -> list[str] | None:
        """Fingerprints of all blocks that engines have shared; None if the store does not list
        them. Raises OSError if the store does not answer."""
        return None

    def advice(self, config: CacheConfig) -> list[tuple[str, str]]:
        """Sentences about what is set without effect, each with what to use in its place."""
        return []

    def refuse(self, config: CacheConfig) -> None:
        """Raise the error of a start with these settings, if it would have one. Sends nothing."""
        self.import_client(config)

    def import_client(self, config: CacheConfig) -> None:
        """Import the client of the store. Raises ConfigError if it is not installed, or cannot be
        imported."""
        try:
            import_module(self._client)
        except ImportError as error:
            raise self.lacks_client(config, str(error)) from None

    def lacks_client(self, config: CacheConfig, why: str) -> ConfigError:
        """The error of a setting whose store has no client here."""
        return ConfigError(
            f"{self.setting} is {self.address(config)!r}, but its client cannot be imported "
            f"({why}); allowed: none, or what `pip install 'flexkv[{self.medium.value}]'` installs"
        )

    def address(self, config: CacheConfig) -> str | None:
        """The store's address; None if the settings name no such store."""
        address: str | None = getattr(config, self.setting)
        return address

    def admission(self, config: CacheConfig) -> Admission:
        return ADMISSIONS[getattr(config, f"{self.medium.value}_admission")]

    def timeout_seconds(self, config: CacheConfig) -> float:
        """The time limit of one read or write."""
        seconds: float = getattr(config, f"{self.medium.value}_timeout_seconds")
        return seconds

    def limits(self, config: CacheConfig, queue_bytes: int) -> RemoteLimits:
        """The bounds that the settings give a tier of the store."""
        question_seconds = getattr(config, f"{self.medium.value}_question_seconds")
        return RemoteLimits(question_seconds, self.timeout_seconds(config), queue_bytes=queue_bytes)


def all_stores() -> Iterator[SharedStore]:
    """All kinds, the fastest first."""
    for medium in BELOW:
        if medium.is_shared:
            store: SharedStore = import_module(f"flexkv.tiers.{medium.value}").STORE
            yield store


def shared_stores(config: CacheConfig) -> Iterator[SharedStore]:
    """Those that the settings name, the fastest first."""
    return (store for store in all_stores() if store.address(config) is not None)
