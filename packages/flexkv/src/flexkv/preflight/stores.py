# SPDX-License-Identifier: Apache-2.0
"""Checks of shared stores: their clients, and whether they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

from flexkv.open_tiers import import_mooncake, import_objects, lacks_client
from flexkv.preflight.findings import Finding, Level
from flexkv.settings import CacheConfig
from flexkv.tiers.mooncake.metadata_record import HTTP, MetadataRecord

_NOBODY = "0" * 32
"""A fingerprint that no blocks have."""


def refuse_mooncake(config: CacheConfig) -> None:
    """Refuse a Mooncake Store without its client, which is not imported: that starts threads, and
    an engine may fork this process.

    Raises:
        ConfigError: the client is not installed.
    """
    master = config.mooncake_master
    if master is not None and find_spec("mooncake") is None:
        raise lacks_client("mooncake_master", master, "mooncake", "no module named 'mooncake'")


def refuse_objects(config: CacheConfig) -> None:
    """Refuse a bucket without its client, or one that its address or the environment's variables do
    not describe, and a shared folder that FlexKV does not use. Sends nothing.

    Raises:
        ConfigError: the client cannot be imported.
        StoreSettingError: see `open_objects.connect`.
    """
    if config.objects_url is not None:
        import_objects(config.objects_url)
        from flexkv.tiers.objects.open_objects import connect

        connect(config.objects_url, config.objects_timeout_seconds)


def check_mooncake(config: CacheConfig) -> Iterator[Finding]:
    """Check whether the servers of the Mooncake Store answer. Joins nothing."""
    master, metadata = config.mooncake_master, config.mooncake_metadata
    if master is None or metadata is None:
        return
    import_mooncake(master)
    from flexkv.tiers.mooncake.join import own_address

    yield _answer("mooncake", f"mooncake_master {master}", lambda: own_address(master))
    if metadata.startswith(HTTP):
        record = MetadataRecord(metadata, _NOBODY, config.mooncake_timeout_seconds)
        yield _answer("mooncake", f"mooncake_metadata {metadata}", record.read)


def check_objects(config: CacheConfig) -> Iterator[Finding]:
    """Check whether the bucket answers. Writes nothing there."""
    if config.objects_url is None:
        return
    from flexkv.tiers.objects.object_store import reach
    from flexkv.tiers.objects.open_objects import connect, unread_variables

    for text, change in unread_variables(config.objects_url):
        yield Finding("objects", Level.ADVICE, text, change)
    store = connect(config.objects_url, config.objects_timeout_seconds)
    # An address may hold a secret.
    yield _answer("objects", "objects_url", lambda: reach(store))


def _answer(name: str, store: str, ask: Callable[[], object]) -> Finding:
    try:
        ask()
    except OSError as error:
        change = "an engine starts without it, and uses it once it answers: start it, or correct "
        change += "its address and credentials"
        return Finding(name, Level.PROBLEM, f"{store} cannot be used: {error}", change)
    return Finding(name, Level.OK, f"{store} answers")
