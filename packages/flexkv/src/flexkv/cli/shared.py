# SPDX-License-Identifier: Apache-2.0
"""The shared stores that the settings name, for the commands that change them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexkv.settings import CacheConfig
from flexkv.tiers import epochs
from flexkv.tiers.disk.folder import fingerprint_of
from flexkv.tiers.shared_store import SharedStore, all_stores, shared_stores
from flexkv.types.errors import ConfigError

_FINGERPRINT = re.compile("[0-9a-f]{32}")
"""What `flexkv.layout.fingerprint` makes."""


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """The blocks of one fingerprint in a shared store.

    Attributes:
        store: address of the store, as in the settings.
        fingerprint: fingerprint of the blocks, hexadecimal.
        record: the record of the blocks' epoch and generation, which all engines read.
    """

    store: str
    fingerprint: str
    record: epochs.EpochRecord

    def clear(self) -> bool:
        """Begin a new generation, in which no process finds these blocks; see `epochs.clear`.

        Returns:
            False if there was nothing to clear.

        Raises:
            OSError: the store cannot be reached.
        """
        return epochs.clear(self.record)


def is_fingerprint(text: str) -> bool:
    """Whether `text` has the form of a fingerprint."""
    return _FINGERPRINT.fullmatch(text) is not None


def shared_blocks(
    config: CacheConfig, fingerprint: str | None, folders: Callable[[], Sequence[str]]
) -> list[SharedBlocks]:
    """List the blocks in the shared stores that the settings name.

    Args:
        config: the settings.
        fingerprint: the only fingerprint to list; None for all. A bucket lists its fingerprints.
            For a store that does not, they are those of the others and of `folders`.
        folders: finds the paths of the folders in the cache directories.

    Raises:
        ConfigError: the settings name no shared store, no fingerprint is known, a store cannot be
            listed, or its client is not installed.
        StoreSettingError: a store cannot be used as the settings name it.
    """
    given = [] if fingerprint is None else [fingerprint]
    stores = list(shared_stores(config))
    if not stores:
        raise ConfigError(
            "the settings name no shared store; allowed: with "
            f"{' or '.join(each.setting for each in all_stores())} set"
        )
    listed: dict[SharedStore, list[str] | None] = {}
    for store in stores:
        try:
            found = None if given else store.fingerprints(config)
        except OSError as error:
            raise ConfigError(
                f"{store.setting} is {store.address(config)!r}, which cannot be listed ({error}); "
                "allowed: a store that answers and that this user may list, or a fingerprint"
            ) from None
        # Whoever can write to a bucket chooses the names there, which a terminal may obey.
        listed[store] = None if found is None else list(filter(is_fingerprint, found))
    known = given
    if not given and None in listed.values():
        of_others = {each for found in listed.values() for each in found or ()}
        of_folders = map(fingerprint_of, folders())
        known = sorted(of_others.union(filter(None, of_folders)))
    blocks = []
    for store in stores:
        found = listed[store]
        address, own = str(store.address(config)), known if found is None else found
        if not own and found is None:
            raise ConfigError(
                f"NAME is 'all' on the command line, and {store.medium.value} at {address} does "
                "not list fingerprints; allowed: one that an engine logs when it starts"
            )
        records = store.records(config, own)
        blocks += [SharedBlocks(address, *each) for each in zip(own, records, strict=True)]
    return blocks
