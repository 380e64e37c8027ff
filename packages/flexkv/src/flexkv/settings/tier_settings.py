# SPDX-License-Identifier: Apache-2.0
"""The settings of the tiers: host memory, disks, and the stores that nodes share.

`CacheConfig` has all of them. These classes have no slots, because Python lays out the slots of one
base only.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.admission import ADMISSIONS
from flexkv.eviction import AUTO, POLICIES
from flexkv.settings.kinds import (
    parse_bool,
    parse_bucket_url,
    parse_devices,
    parse_directories,
    parse_host_port,
    parse_http_url,
    parse_name,
    parse_number,
    parse_whole,
)
from flexkv.settings.setting import DAY_SECONDS, LEAST_GIB, MOST_GIB, SIZE, setting

_MOST_REPLICAS = 16


@dataclass(frozen=True)
class HostSettings:
    """The settings of FlexKV as a whole and of host memory."""

    enable: bool = setting(
        True,
        env="ENABLE_FLEXKV",
        unit="boolean",
        help="Turns FlexKV off without touching the engine's command line.",
        parse=parse_bool,
        allowed="1, 0, true, false, yes, no, on, off",
    )
    cpu_cache_gb: float | None = setting(
        None,
        env="FLEXKV_CPU_CACHE_GB",
        unit="GiB",
        help=(
            "Host memory for cached blocks, in GiB, for all ranks of an engine together. FlexKV "
            "allocates and fills it at start. Default: twice the size of the engine's own KV "
            "cache, at least 16, and at most half of the memory that is available at start. "
            "Memory that other starting engines of this user are about to take is not available."
        ),
        parse=parse_number(LEAST_GIB, MOST_GIB),
        allowed=f"{SIZE}, at most the memory that is available at start",
    )
    eviction_policy: str = setting(
        "lru",
        env="FLEXKV_EVICTION_POLICY",
        unit="name",
        help=(
            "Which blocks are evicted first when host memory is full. `lru`: those used longest "
            "ago. `s3fifo`: those that no other request has found, so that many prompts used once "
            "do not evict prompts used often. `arc`: a balance of the two, which it finds itself. "
            "`hazard`: those with the fewest hits to expect for the time of keeping them, which it "
            "learns from the requests: the turn of a conversation, its length, its age. `auto`: "
            "`hazard` under vLLM's connector, for models with one KV cache group, and under "
            "SGLang's linker; else `lru`. The log and the metrics name the choice."
        ),
        parse=parse_name((AUTO, *POLICIES)),
        allowed=", ".join(sorted((AUTO, *POLICIES))),
    )


@dataclass(frozen=True)
class DiskSettings:
    """The settings of the disks."""

    ssd_cache_gb: float | None = setting(
        None,
        env="FLEXKV_SSD_CACHE_GB",
        unit="GiB",
        help=(
            "Disk space for cached blocks, in GiB, of all directories in `ssd_cache_dir` together. "
            "It is a hard bound on the bytes on disk, and allocated at start. Blocks on disk "
            "survive the engine. Default: no disk is used."
        ),
        parse=parse_number(LEAST_GIB, MOST_GIB),
        allowed=f"{SIZE}, at most the free space of the file systems, and ssd_cache_dir",
    )
    ssd_cache_dir: tuple[str, ...] = setting(
        (),
        env="FLEXKV_SSD_CACHE_DIR",
        unit="absolute paths",
        help=(
            "Directories for cached blocks, several separated by `;`. Put each on a local NVMe "
            "drive of its own; FlexKV distributes blocks over them. Default: none."
        ),
        parse=parse_directories,
        allowed="absolute paths separated by `;` (not `,` or `:`), none twice, and ssd_cache_gb",
    )
    ssd_admission: str = setting(
        "write_through",
        env="FLEXKV_SSD_ADMISSION",
        unit="name",
        help=(
            "Which blocks are written to disk. `write_through`: all, once they are in host memory. "
            "`second_hit`: those that a request finds. `on_evict`: those about to be evicted from "
            "host memory."
        ),
        parse=parse_name(ADMISSIONS),
        allowed=", ".join(ADMISSIONS),
    )
    ssd_write_gb_per_day: float | None = setting(
        None,
        env="FLEXKV_SSD_WRITE_GB_PER_DAY",
        unit="GiB per 24 hours",
        help=(
            "The most to write to all directories together in any 24 hours, restarts included, to "
            "spare the drives. Blocks beyond the limit stay in host memory only. Default: no limit."
        ),
        parse=parse_number(LEAST_GIB, MOST_GIB),
        allowed=SIZE,
    )
    ssd_in_use: str = setting(
        "error",
        env="FLEXKV_SSD_IN_USE",
        unit="name",
        help=(
            "How a second engine with the same model starts if a directory is in use. `error`: it "
            "refuses to start. `own`: it keeps a cache of its own there, also of `ssd_cache_gb`; "
            "data-parallel engines need this."
        ),
        parse=parse_name(("error", "own")),
        allowed="error, own",
    )
    ssd_other_models: str = setting(
        "keep",
        env="FLEXKV_SSD_OTHER_MODELS",
        unit="name",
        help=(
            "How a start treats folders of other models in `ssd_cache_dir` that no engine uses. "
            "`keep`: it removes them only if the file system lacks room for this model's folder, "
            "those used longest ago first. `remove`: it removes all of them, so that a directory "
            "never has more than `ssd_cache_gb`."
        ),
        parse=parse_name(("keep", "remove")),
        allowed="keep, remove",
    )
    ssd_timeout_seconds: float = setting(
        1.0,
        env="FLEXKV_SSD_TIMEOUT_SECONDS",
        unit="seconds",
        help=(
            "The time limit for one read or write on disk. Blocks that a disk has not delivered by "
            "then are computed. FlexKV skips the disk while half of its threads wait for longer "
            "and no read or write ends."
        ),
        parse=parse_number(0.001, DAY_SECONDS),
        allowed=f"a number from 0.001 to {DAY_SECONDS:.0f}",
    )


@dataclass(frozen=True)
class StoreSettings:
    """The settings of the stores that nodes share: Mooncake Store, and buckets."""

    mooncake_master: str | None = setting(
        None,
        env="FLEXKV_MOONCAKE_MASTER",
        unit="HOST:PORT",
        help=(
            "The master of a Mooncake Store, host memory that engines on many nodes share. "
            "Default: no Mooncake Store is used."
        ),
        parse=parse_host_port,
        allowed="HOST:PORT, and mooncake_metadata",
    )
    mooncake_metadata: str | None = setting(
        None,
        env="FLEXKV_MOONCAKE_METADATA",
        unit="URL",
        help=(
            "The HTTP metadata server of the Mooncake Store, `http://HOST:PORT/metadata`. "
            "Default: none."
        ),
        parse=parse_http_url,
        allowed="http://HOST:PORT/metadata, and mooncake_master",
    )
    mooncake_protocol: str = setting(
        "tcp",
        env="FLEXKV_MOONCAKE_PROTOCOL",
        unit="name",
        help="How nodes send blocks to each other.",
        parse=parse_name(("rdma", "tcp")),
        allowed="rdma, tcp",
    )
    mooncake_device: str = setting(
        "",
        env="FLEXKV_MOONCAKE_DEVICE",
        unit="names",
        help="RDMA devices, separated by commas; empty for those that Mooncake finds.",
        parse=parse_devices,
        allowed="names of devices, separated by commas",
    )
    mooncake_segment_gb: float = setting(
        1.0,
        env="FLEXKV_MOONCAKE_SEGMENT_GB",
        unit="GiB",
        help=(
            "Host memory that this engine lends to the Mooncake Store, beside `cpu_cache_gb`. "
            "The blocks in it are lost when the engine ends."
        ),
        parse=parse_number(0.0, MOST_GIB),
        allowed=f"a number from 0 to {MOST_GIB:.0f}",
    )
    mooncake_replicas: int = setting(
        1,
        env="FLEXKV_MOONCAKE_REPLICAS",
        unit="copies",
        help="On how many nodes the Mooncake Store keeps each block.",
        parse=parse_whole(1, _MOST_REPLICAS),
        allowed=f"a whole number from 1 to {_MOST_REPLICAS}",
    )
    mooncake_admission: str = setting(
        "write_through",
        env="FLEXKV_MOONCAKE_ADMISSION",
        unit="name",
        help=(
            "Which blocks are written to the Mooncake Store; the names are those of "
            "`ssd_admission`."
        ),
        parse=parse_name(ADMISSIONS),
        allowed=", ".join(ADMISSIONS),
    )
    mooncake_question_seconds: float = setting(
        0.005,
        env="FLEXKV_MOONCAKE_QUESTION_SECONDS",
        unit="seconds",
        help=(
            "How long a request waits for the Mooncake Store to say which of its blocks are "
            "there. Blocks that it has not answered for by then are computed."
        ),
        parse=parse_number(0.0001, DAY_SECONDS),
        allowed=f"a number from 0.0001 to {DAY_SECONDS:.0f}",
    )
    mooncake_timeout_seconds: float = setting(
        1.0,
        env="FLEXKV_MOONCAKE_TIMEOUT_SECONDS",
        unit="seconds",
        help=(
            "How long the Mooncake Store may take for one read or write. Blocks that do not come "
            "by then are computed. The store is left out while half of FlexKV's calls take longer "
            "and none ends."
        ),
        parse=parse_number(0.001, DAY_SECONDS),
        allowed=f"a number from 0.001 to {DAY_SECONDS:.0f}",
    )
    objects_url: str | None = setting(
        None,
        env="FLEXKV_OBJECTS_URL",
        unit="URL",
        help=(
            "A bucket that engines on many nodes share blocks in: `s3://BUCKET/PATH`, "
            "`gs://BUCKET/PATH`, `az://CONTAINER/PATH`. Credentials, region and endpoint come from "
            "the environment (`AWS_...`, `GOOGLE_...`, `AZURE_...`), or from the machine's role. "
            "Default: no bucket is used."
        ),
        parse=parse_bucket_url,
        allowed=(
            "s3://, gs://, az:// or abfss://CONTAINER@HOST, a bucket and a path; without "
            "credentials, `?` and `#`"
        ),
    )
    objects_admission: str = setting(
        "write_through",
        env="FLEXKV_OBJECTS_ADMISSION",
        unit="name",
        help="Which blocks are written to the bucket; the names are those of `ssd_admission`.",
        parse=parse_name(ADMISSIONS),
        allowed=", ".join(ADMISSIONS),
    )
    objects_question_seconds: float = setting(
        0.05,
        env="FLEXKV_OBJECTS_QUESTION_SECONDS",
        unit="seconds",
        help=(
            "How long a request waits for the bucket to say which of its blocks are there. Blocks "
            "that the bucket has not answered for by then are computed."
        ),
        parse=parse_number(0.001, DAY_SECONDS),
        allowed=f"a number from 0.001 to {DAY_SECONDS:.0f}",
    )
    objects_timeout_seconds: float = setting(
        5.0,
        env="FLEXKV_OBJECTS_TIMEOUT_SECONDS",
        unit="seconds",
        help=(
            "How long the bucket may take for one read or write. Blocks that do not come by then "
            "are computed. The bucket is left out while half of FlexKV's calls take longer and "
            "none ends."
        ),
        parse=parse_number(0.001, DAY_SECONDS),
        allowed=f"a number from 0.001 to {DAY_SECONDS:.0f}",
    )
