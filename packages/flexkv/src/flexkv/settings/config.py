# SPDX-License-Identifier: Apache-2.0
"""The settings of FlexKV, one field each. `config_sources` reads their values from all sources."""

from __future__ import annotations

import dataclasses
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexkv.eviction import AUTO, OTHERWISE
from flexkv.settings.kinds import (
    bucket_url,
    choice,
    choices,
    count,
    devices,
    flag,
    gib,
    gib_or_none,
    http_or_etcd,
    path,
    paths,
    seconds,
    server_or_etcd,
    shares,
    tenant,
)
from flexkv.settings.setting import Given, ReadBy, declared, setting
from flexkv.types.admission import ADMISSIONS
from flexkv.types.changes import Medium
from flexkv.types.errors import ConfigError

GIB = 1 << 30
"""Bytes of a GiB, the unit of all sizes in settings."""

MOST_PIN_SECONDS = 30 * 24 * 3600
"""The longest time for which a setting or a request may pin blocks."""
_PIN_OPTIONS = ("pin", "pin_seconds", "pin_name", "unpin")
_FREE_OPTIONS = (
    *("load", "store", "max_load_tokens", "load_mode", "session", "returns"),
    *("max_store_tokens", "retain_seconds", "release", "priority", "demote"),
    "announced_tokens",
)
"""The parameters of requests, without their prefix. Those that do not pin concern little more than
the request that has them."""

# The largest values that settings take. A larger number is a mistake, such as another unit.
_MOST_AGE_SECONDS = 365 * 24 * 3600
_MOST_TOKENS = 1 << 30
_MOST_BLOCK_TOKENS = 1 << 20
_MOST_PORT = 65535
_MOST_THREADS = 1024
_MOST_REPLICAS = 16


def default_runtime_dir() -> str:
    """The path of `runtime_dir` if no source sets it. The directory may be missing.

    It is `flexkv` in `XDG_RUNTIME_DIR` if that is private to this user, else
    `/dev/shm/flexkv-<uid>`. Without a writable `/dev/shm`, it is `flexkv-<uid>` in the temporary
    directory.
    """
    private = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(private) and _is_private(private):
        return os.path.join(private, "flexkv")
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return os.path.join(base, f"flexkv-{os.geteuid()}")


def _is_private(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    mode = stat.S_IMODE(status.st_mode)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and mode == stat.S_IRWXU


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """All settings, in the order of the settings page. `load_config` builds it from all sources.

    A program may make one, too. Every value is read as one of a file is: a folder may be given as a
    text, and one that is not allowed is a ConfigError, as is a setting without one that it needs.

    A new setting is a new field. Its kind has the parser, the unit and the allowed values.
    """

    enable: bool = setting(
        flag(),
        True,
        "Turns FlexKV off without touching the engine's command line.",
        variable="ENABLE_FLEXKV",
        read_by=ReadBy.ALL,
    )
    cpu_cache_gb: float | None = setting(
        gib(limit="at most the memory that is available at start, unless `memory_grows`"),
        None,
        "Host memory for cached blocks, in GiB, for all ranks of an engine together. FlexKV "
        "allocates and fills it at start. Default: twice the size of the engine's own KV cache, "
        "at least 16, or without an engine twice the pages of the layout, and at most half of the "
        "memory that is available at start. Memory that other starting engines of this user are "
        "about to take is not available.",
    )
    memory_grows: bool = setting(
        flag(),
        False,
        "Whether this machine gets more memory while it uses what it has, as some virtual machines "
        "and sandboxes do. Then `cpu_cache_gb` may be larger than the memory that is available at "
        "start. FlexKV takes 256 MiB after another, each once the machine has it beside 2 GiB for "
        "other programs. If the machine gets no more for 60 s, the start fails.",
        needs="cpu_cache_gb",
    )
    service: str | None = setting(
        path("the directory of a `flexkv serve` that runs"),
        None,
        "The directory of the node's service, `flexkv serve DIR`. All engines that name it and run "
        "the same model share one host memory and the tiers below it, which the service's own "
        "settings name: `cpu_cache_gb`, `eviction_policy`, `pin_seconds` and those of lower tiers "
        "have no effect in the engine. Default: the engine has a cache of its own.",
        read_by=ReadBy.ALL,
    )
    eviction_policy: str = setting(
        choice([AUTO, OTHERWISE]),
        AUTO,
        "Which blocks are evicted first when host memory is full, or the disk. `auto`: where "
        "FlexKV follows whole requests, those with the fewest hits to expect for the time of "
        "keeping them. It learns that from the requests: the turn of a conversation, its length, "
        "its age. While `lru` would have found more, and where FlexKV sees no whole requests, it "
        "is `lru`. `lru`: those used longest ago. The log and the metrics name the choice.",
    )
    tenant_shares: tuple[tuple[str, float], ...] = setting(
        shares(),
        (),
        "Parts of host memory, in percent, that tenants have a right to: `team-a=40;team-b=20`, or "
        "a mapping in a file. A tenant below its share loses no block to one above it; what a "
        "tenant does not use is lent to the others. Tenants that are not named have the rest "
        "together. A tenant is what `tenant` or the `cache_salt` of a request names. Default: all "
        "requests share one memory.",
    )
    ssd_cache_gb: float | None = setting(
        gib_or_none("at most the free space of the file systems"),
        None,
        "Disk space for cached blocks, in GiB, of all directories in `ssd_cache_dir` together. It "
        "is a hard bound on the bytes on disk, and allocated at start. Blocks on disk survive the "
        "engine. With 0, `ssd_cache_dir` has no effect. Default: no disk is used.",
        needs="ssd_cache_dir",
    )
    ssd_cache_dir: tuple[str, ...] = setting(
        paths(),
        (),
        "Directories for cached blocks, several separated by `;`. Put each on a local NVMe drive "
        "of its own; FlexKV distributes blocks over them. Relative paths and `~` are refused, "
        "because the processes of an engine may start in other directories. Default: none.",
        needs="ssd_cache_gb",
    )
    ssd_admission: str = setting(
        choice(ADMISSIONS),
        "write_through",
        "Which blocks are written to disk. `write_through`: all, once they are in host memory. "
        "`second_hit`: those that a request finds. `on_evict`: those about to be evicted from "
        "host memory.",
        acts_with="ssd_cache_gb",
    )
    ssd_write_gb_per_day: float | None = setting(
        gib(unit="GiB per 24 hours"),
        None,
        "The most to write to all directories together in any 24 hours, restarts included, to "
        "spare the drives. Blocks beyond the limit stay in host memory only. Default: no limit.",
        acts_with="ssd_cache_gb",
    )
    ssd_in_use: str = setting(
        choice(("error", "own")),
        "error",
        "What a second engine with the same model does if a directory is in use. `error`: it "
        "logs an error, does without the directory, and uses it once the first engine has "
        "ended. `own`: it keeps a cache of its own there, also of `ssd_cache_gb`.",
        acts_with="ssd_cache_gb",
    )
    ssd_other_models: str = setting(
        choice(("keep", "remove")),
        "keep",
        "How a start treats folders of other models in `ssd_cache_dir` that no engine uses. "
        "`keep`: it removes them only if the file system lacks room for this model's folder, "
        "those used longest ago first. `remove`: it removes all of them, so that a directory "
        "never has more than `ssd_cache_gb`.",
        acts_with="ssd_cache_gb",
    )
    ssd_timeout_seconds: float = setting(
        seconds(0.001),
        1.0,
        "The time limit for one read or write on disk. Blocks that a disk has not delivered by "
        "then are computed. FlexKV skips the disk while half of its threads wait for longer and "
        "no read or write ends.",
        acts_with="ssd_cache_gb",
    )
    mooncake_master: str | None = setting(
        server_or_etcd(),
        None,
        "The master of a Mooncake Store, host memory that engines on many nodes share. "
        "`etcd://HOST:PORT;HOST:PORT` has etcd name one of several masters. Default: no Mooncake "
        "Store is used.",
        needs="mooncake_metadata",
    )
    mooncake_metadata: str | None = setting(
        http_or_etcd("http://HOST:PORT/metadata", "P2PHANDSHAKE"),
        None,
        "How the nodes of the Mooncake Store find each other: by its HTTP metadata server, "
        "`http://HOST:PORT/metadata`, by etcd, or by themselves (`P2PHANDSHAKE`). It is the same "
        "on all nodes. Default: none.",
        needs="mooncake_master",
    )
    mooncake_protocol: str = setting(
        choice(("rdma", "tcp")),
        "tcp",
        "How nodes send blocks to each other.",
        acts_with="mooncake_master",
    )
    mooncake_device: str = setting(
        devices(),
        "",
        "RDMA devices, separated by commas. Default: those that Mooncake finds.",
        acts_with="mooncake_master",
    )
    mooncake_segment_gb: float = setting(
        gib(0),
        1.0,
        "Host memory that this engine lends to the Mooncake Store, beside `cpu_cache_gb`. The "
        "blocks in it are lost when the engine ends.",
        acts_with="mooncake_master",
    )
    mooncake_replicas: int = setting(
        count(1, _MOST_REPLICAS, "copies"),
        1,
        "On how many nodes the Mooncake Store keeps each block.",
        acts_with="mooncake_master",
    )
    mooncake_admission: str = setting(
        choice(ADMISSIONS),
        "write_through",
        "Which blocks are written to the Mooncake Store; the names are those of `ssd_admission`.",
        acts_with="mooncake_master",
    )
    mooncake_question_seconds: float = setting(
        seconds(0.0001),
        0.005,
        "How long a request waits for the Mooncake Store to say which of its blocks are there. "
        "Blocks that it has not answered for by then are computed.",
        acts_with="mooncake_master",
    )
    mooncake_timeout_seconds: float = setting(
        seconds(0.001),
        1.0,
        "How long the Mooncake Store may take for one read or write. Blocks that do not come by "
        "then are computed. The store is left out while half of FlexKV's calls take longer and "
        "none ends.",
        acts_with="mooncake_master",
    )
    objects_url: str | None = setting(
        bucket_url(),
        None,
        "A bucket that engines on many nodes share blocks in: `s3://BUCKET/PATH`, "
        "`gs://BUCKET/PATH`, `az://CONTAINER/PATH`. Credentials, region and endpoint come from "
        "the environment (`AWS_...`, `GOOGLE_...`, `AZURE_...`), or from the machine's role. "
        "`file:///PATH` names a folder of a file system that the nodes share, such as Lustre or "
        "NFS, which takes the place of a bucket. Default: no bucket is used.",
    )
    objects_admission: str = setting(
        choice(ADMISSIONS),
        "write_through",
        "Which blocks are written to the bucket; the names are those of `ssd_admission`.",
        acts_with="objects_url",
    )
    objects_question_seconds: float = setting(
        seconds(0.001),
        0.05,
        "How long a request waits for the bucket to say which of its blocks are there. Blocks "
        "that the bucket has not answered for by then are computed.",
        acts_with="objects_url",
    )
    objects_timeout_seconds: float = setting(
        seconds(0.001),
        5.0,
        "How long the bucket may take for one read or write. Blocks that do not come by then are "
        "computed. The bucket is left out while half of FlexKV's calls take longer and none ends.",
        acts_with="objects_url",
    )
    block_tokens: int | None = setting(
        count(1, _MOST_BLOCK_TOKENS, "tokens", "a multiple of the engine's block size"),
        None,
        "Tokens of one FlexKV block, the unit of lookup, eviction and copies; a multiple of the "
        "engine's block size. Small blocks waste less of a prompt's tail; large blocks cost less "
        "to manage. Default: the smallest multiple whose block over all layers and ranks has 2 "
        "MiB, at most 128 tokens, at least one engine block. With the engine's KV events on: one "
        "engine block, since a block is announced as a whole.",
        read_by=ReadBy.ENGINE,
    )
    load_mode: str = setting(
        choice(("async", "layerwise", "auto")),
        "async",
        "How blocks are loaded from host memory into the engine. `async`: before the request "
        "computes, while other requests compute. `layerwise`: beside the forward pass of the same "
        "step, which waits for the blocks layer by layer; all requests of that step wait with it. "
        "`auto`: the faster of the two by measured load times; on a GPU not layerwise if other "
        "requests would wait longer than one step. Layerwise loads need an engine that begins a "
        "step only when the last one has ended. Models with several kinds of attention are always "
        "loaded `async`.",
        read_by=ReadBy.ENGINE,
    )
    min_load_tokens: int = setting(
        count(0, _MOST_TOKENS, "tokens"),
        0,
        "Hits of fewer tokens are computed instead of loaded. In addition, FlexKV measures how "
        "long computing and loading take, and loads a hit only if that is faster.",
        read_by=ReadBy.ENGINE,
    )
    pin_seconds: int = setting(
        count(1, MOST_PIN_SECONDS, "seconds"),
        3600,
        "How long blocks stay in host memory that a request pins (see `request_options`), unless "
        "it sets a time of its own. Each request that pins the blocks again restarts the time.",
    )
    max_age_seconds: int | None = setting(
        count(60, _MOST_AGE_SECONDS, "seconds"),
        None,
        "Blocks that were computed longer ago are not loaded any more, and leave host memory and "
        "disk, also after a restart and also if they are pinned; the metric "
        "`expired_blocks_total` counts them. They leave 8 seconds early, and up to 32 seconds "
        "earlier if their time was rounded: to a 64th of this setting, or to 32 seconds on disk. "
        "Blocks of which the time is unknown, because they were stored without this setting, "
        "leave at the next start. It takes "
        "about 200 bytes of memory for a block in host memory, and 4 bytes for a block on disk. "
        "FlexKV cannot remove single blocks from stores that engines share: with "
        "`mooncake_master` or `objects_url` the setting is refused. What the engine computes on "
        "blocks of its own prefix cache, or stores from there again, counts as new. "
        "Default: blocks have no greatest age.",
    )
    request_options: tuple[str, ...] = setting(
        choices((*_FREE_OPTIONS, *_PIN_OPTIONS)),
        _FREE_OPTIONS,
        "The parameters that requests may set, without `flexkv.`, separated by `,`; `all` and "
        "`none` stand for themselves. FlexKV ignores other parameters and logs them. Any client "
        "of the engine can send them. With `pin`, clients may keep up to half of the host memory "
        "for themselves, with `pin_seconds` for a time of their choice.",
        read_by=ReadBy.ENGINE,
    )
    tenant: str | None = setting(
        tenant(),
        None,
        "The tenant of all requests of this engine; see `tenant_shares`. Default: the `cache_salt` "
        "of each request names its tenant.",
        read_by=ReadBy.ENGINE,
    )
    always_load: bool = setting(
        flag(),
        False,
        "Load every hit, even if the load is expected to take longer than computing. The request "
        "waits longer, but the processor is free for other requests.",
        read_by=ReadBy.ENGINE,
    )
    copy_threads: int | None = setting(
        count(1, _MOST_THREADS, "threads"),
        None,
        "Threads per worker process that copy between the engine's pages and host memory. They "
        "are used only if the engine's tensors are in host memory. Default: 4, or the number of "
        "usable cores if that is less.",
        read_by=ReadBy.ENGINE,
    )
    runtime_dir: str | None = setting(
        path("a directory that only this user can write to"),
        None,
        "Directory where the processes of one engine find each other by small files. FlexKV "
        "removes them at shutdown; the next start removes those of a killed engine. Only this "
        "user may have the right to write to the directory. Directories above must be root's or "
        "this user's, and others may not write to this user's unless they are sticky. Default: "
        "`flexkv` in XDG_RUNTIME_DIR if that is this user's with mode 0700, else "
        "/dev/shm/flexkv-UID, or the temporary directory if there is no /dev/shm.",
        read_by=ReadBy.ALL,
    )
    control_port: int | None = setting(
        count(1, _MOST_PORT, "port"),
        None,
        "A port on 127.0.0.1 at which the engine answers by HTTP what `flexkv lookup`, `warm`, "
        "`pin`, `unpin`, `release` and `clear` ask of a running engine: `GET /openapi.json` "
        "describes the calls. Each call needs the token in `control_token_file`. If the port is "
        "taken, the engine logs it and works without. Default: no port.",
        needs="control_token_file",
        read_by=ReadBy.ENGINE,
    )
    control_token_file: str | None = setting(
        path("a file of this user with mode 0600"),
        None,
        "The file with the token for `control_port`: 16 to 512 letters, digits and `._~+/=-`. It "
        "is read at start. Default: none.",
        read_by=ReadBy.ENGINE,
    )
    trace: str | None = setting(
        path("a new file, or of a recording of this user"),
        None,
        "A file to record requests to, for `flexkv plan`: salted digests of blocks, lengths and "
        "times, no text. Only this user can read it. An engine adds to a recording that is there; "
        "each engine needs a file of its own. Default: nothing is recorded.",
        read_by=ReadBy.ENGINE,
    )
    trace_gb: float = setting(
        gib(),
        1.0,
        "How large the file of `trace` may become; then recording ends. A request takes about 100 "
        "bytes, and 16 for each of its blocks.",
        acts_with="trace",
        read_by=ReadBy.ENGINE,
    )
    log_level: str = setting(
        choice(("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", "OFF")),
        "INFO",
        "The lowest level of messages that FlexKV writes to the engine's log.",
        read_by=ReadBy.ALL,
    )
    allow_untested_engine: bool = setting(
        flag(),
        False,
        "Start with an engine version outside the supported range, at your own risk.",
        read_by=ReadBy.ENGINE,
    )

    def __post_init__(self) -> None:
        given = {}
        for name, each in SETTINGS.items():
            value = getattr(self, name)
            if value is not each.default:
                given[name] = each.given(value, f"CacheConfig({name}=...)")
        for name, value in values_of(given).items():
            object.__setattr__(self, name, value)
        if self.max_age_seconds is not None and self.names_shared_store:
            store = next(each for each in _ADDRESSES if getattr(self, each) is not None)
            raise ConfigError(
                f"max_age_seconds is {self.max_age_seconds}, and {store} is set, whose store keeps "
                "blocks for other engines; allowed: one of them, and for a bucket its own rules "
                "about the age of objects"
            )

    @property
    def names_lower_tier(self) -> bool:
        """Whether blocks are kept beyond the process, on disk or in a shared store."""
        return self.ssd_cache_gb is not None or self.names_shared_store

    @property
    def names_shared_store(self) -> bool:
        """Whether blocks are kept where other engines find them."""
        return any(getattr(self, each) is not None for each in _ADDRESSES)

    def without_shared_stores(self) -> CacheConfig:
        """The same settings without stores that engines share."""
        named = [each for each in SETTINGS.values() if {each.name, each.needs} & set(_ADDRESSES)]
        without: dict[str, Any] = dict.fromkeys((each.name for each in named), None)
        return dataclasses.replace(self, **without)

    @property
    def session_root(self) -> str:
        """Path of the runtime directory in force: `runtime_dir`, or its default."""
        return self.runtime_dir or default_runtime_dir()


SETTINGS = declared(CacheConfig)
"""The settings by name, in the order of the settings page."""


def values_of(given: Mapping[str, Given]) -> dict[str, Any]:
    """The values in force, by the names of settings. A size of 0 turns off the settings that need
    it. Raises ConfigError if a setting lacks the one that it needs."""
    values = {name: each.read for name, each in given.items()}
    changed = [name for name, read in values.items() if read != SETTINGS[name].default]
    for name in changed:
        needed = SETTINGS[name].needs
        if needed and needed not in changed:
            if needed not in given or given[needed].read is not None:
                raise SETTINGS[name].lacks_needed(given[name])
            values[name] = SETTINGS[name].default
    return values


def address_setting(medium: Medium) -> str:
    """Name of the setting with the address of a shared store."""
    return SETTINGS[f"{medium.value}_admission"].acts_with


_ADDRESSES = [address_setting(medium) for medium in Medium if medium.is_shared]
