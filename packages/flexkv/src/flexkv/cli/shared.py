# SPDX-License-Identifier: Apache-2.0
"""The shared stores that the settings name, for the commands that change them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flexkv.open_tiers import import_mooncake, import_objects
from flexkv.settings import CacheConfig
from flexkv.tiers import epochs
from flexkv.tiers.disk import cache_directory
from flexkv.tiers.mooncake.metadata_record import HTTP, MetadataRecord
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


def remove_older(config: CacheConfig, seconds: float, dry_run: bool) -> tuple[int, int]:
    """Remove the old blocks in a shared folder, or only count them.

    Returns:
        The number of files, and their bytes.

    Raises:
        ConfigError: the settings name no shared folder.
        StoreSettingError: the folder cannot be used.
        OSError: a file cannot be removed.
    """
    if not (config.objects_url or "").startswith("file://"):
        given = "is not set" if config.objects_url is None else f"is {config.objects_url!r}"
        raise ConfigError(
            f"--older-than is on the command line, and objects_url {given}; "
            "allowed: with objects_url=file:///PATH (a bucket's own lifecycle rules expire blocks)"
        )
    from flexkv.tiers.objects.shared_folder import remove_older

    return remove_older(str(config.objects_url), seconds, dry_run)


def is_fingerprint(text: str) -> bool:
    """Whether `text` has the form of a fingerprint."""
    return _FINGERPRINT.fullmatch(text) is not None


def shared_blocks(
    config: CacheConfig, fingerprint: str | None, folders: Sequence[str]
) -> list[SharedBlocks]:
    """List the blocks in the shared stores that the settings name.

    Args:
        config: the settings.
        fingerprint: the only fingerprint to list; None for all. A bucket lists its fingerprints.
            Mooncake does not; for it, the fingerprints are those of the bucket and of `folders`.
        folders: paths of the folders in the cache directories.

    Raises:
        ConfigError: no fingerprint is known, or a store's client is not installed.
        StoreSettingError: a store cannot be used as the settings name it.
        OSError: the bucket cannot be reached.
    """
    given = [] if fingerprint is None else [fingerprint]
    found = list(_in_bucket(config, given))
    if config.mooncake_metadata is not None:
        known = given or sorted(
            {each.fingerprint for each in found}
            | {name for path in folders if (name := cache_directory.fingerprint_of(path))}
        )
        if not known:
            raise ConfigError(
                f"--fingerprint is missing on the command line, and Mooncake at "
                f"{config.mooncake_master} does not list fingerprints; allowed: one that an "
                "engine logs when it starts"
            )
        found += _in_mooncake(config, known)
    return found


def _in_bucket(config: CacheConfig, given: Sequence[str]) -> Iterator[SharedBlocks]:
    url = config.objects_url
    if url is None:
        return
    import_objects(url)
    from flexkv.tiers.objects.object_store import ObjectRecord, Requests, fingerprints_in
    from flexkv.tiers.objects.open_objects import connect

    store = connect(url, config.objects_timeout_seconds)
    requests = Requests(store, config.objects_timeout_seconds)
    # Whoever can write to the bucket chooses the names there, which a terminal may obey.
    for fingerprint in given or filter(is_fingerprint, fingerprints_in(store)):
        yield SharedBlocks(url, fingerprint, ObjectRecord(requests, fingerprint))


def _in_mooncake(config: CacheConfig, known: Sequence[str]) -> Iterator[SharedBlocks]:
    metadata, master = str(config.mooncake_metadata), str(config.mooncake_master)
    seconds = config.mooncake_timeout_seconds
    if metadata.startswith(HTTP):
        for fingerprint in known:
            record = MetadataRecord(metadata, fingerprint, seconds)
            yield SharedBlocks(metadata, fingerprint, record)
        return
    import_mooncake(master)
    from flexkv.tiers.mooncake.join import MooncakeSettings
    from flexkv.tiers.mooncake.open_mooncake import open_store_record

    device = config.mooncake_device
    settings = MooncakeSettings(master, metadata, config.mooncake_protocol, device, 0, 1)
    for fingerprint in known:
        yield SharedBlocks(master, fingerprint, open_store_record(settings, fingerprint, seconds))
