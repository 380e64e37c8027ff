# SPDX-License-Identifier: Apache-2.0
"""The settings of FlexKV. `config_sources` reads their values from all sources."""

from __future__ import annotations

import dataclasses
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flexkv.admission import ADMISSIONS
from flexkv.eviction import POLICIES
from flexkv.setting_values import (
    LOAD_MODES,
    LOG_LEVELS,
    parse_bool,
    parse_bucket_url,
    parse_devices,
    parse_directories,
    parse_directory,
    parse_host_port,
    parse_http_url,
    parse_log_level,
    parse_name,
    parse_number,
    parse_whole,
)

GIB = 1 << 30

_LEAST_GIB = 1e-6
"""About one memory page; tests use caches of some KiB."""
_MOST_GIB = float(1 << 20)
"""1 PiB, more than one machine has: a larger number is a mistake, perhaps in bytes."""
_SIZE = f"a number from {_LEAST_GIB} to {_MOST_GIB:.0f}"
_MOST_TOKENS = 1 << 30
MOST_PIN_SECONDS = 30 * 24 * 3600
_MOST_BLOCK_TOKENS = 1 << 20
_MOST_THREADS = 1024
_MOST_REPLICAS = 16
_DAY_SECONDS = 86400.0


def _setting(
    default: Any,
    *,
    env: str,
    unit: str,
    help: str,
    parse: Callable[[object], Any],
    allowed: str,
) -> Any:
    metadata = {"env": env, "unit": unit, "help": help, "parse": parse, "allowed": allowed}
    return field(default=default, metadata=metadata)


def default_runtime_dir() -> str:
    """`flexkv` in `XDG_RUNTIME_DIR` if that is private to this user; else `/dev/shm/flexkv-<uid>`.

    Without a writable `/dev/shm`, the default is `flexkv-<uid>` in the temporary directory.
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
    """All settings. `load_config` builds it from all sources and checks every value."""

    enable: bool = _setting(
        True,
        env="ENABLE_FLEXKV",
        unit="boolean",
        help="Turns FlexKV off without touching the engine's command line.",
        parse=parse_bool,
        allowed="1, 0, true, false, yes, no, on, off",
    )
    cpu_cache_gb: float | None = _setting(
        None,
        env="FLEXKV_CPU_CACHE_GB",
        unit="GiB",
        help=(
            "Host memory for cached blocks, in GiB, for all ranks of an engine together. FlexKV "
            "allocates and fills it at start. Default: 16, or half of the memory that is "
            "available at start if that is less."
        ),
        parse=parse_number(_LEAST_GIB, _MOST_GIB),
        allowed=f"{_SIZE}, at most the memory that is available at start",
    )
    eviction_policy: str = _setting(
        "lru",
        env="FLEXKV_EVICTION_POLICY",
        unit="name",
        help=(
            "Which blocks are evicted first when host memory is full. `lru`: those used longest "
            "ago. `s3fifo`: those that no other request has found, so that many prompts used once "
            "do not evict prompts used often. `arc`: a balance of the two, which it finds itself. "
            "`hazard`: those with the fewest hits to expect for the time of keeping them, which it "
            "learns from the requests: the turn of a conversation, its length, its age."
        ),
        parse=parse_name(POLICIES),
        allowed=", ".join(sorted(POLICIES)),
    )
    ssd_cache_gb: float | None = _setting(
        None,
        env="FLEXKV_SSD_CACHE_GB",
        unit="GiB",
        help=(
            "Disk space for cached blocks, in GiB, of all directories in `ssd_cache_dir` together. "
            "It is a hard bound on the bytes on disk, and allocated at start. Blocks on disk "
            "survive the engine. Default: no disk is used."
        ),
        parse=parse_number(_LEAST_GIB, _MOST_GIB),
        allowed=f"{_SIZE}, at most the free space of the file systems, and ssd_cache_dir",
    )
    ssd_cache_dir: tuple[str, ...] = _setting(
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
    ssd_admission: str = _setting(
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
    ssd_write_gb_per_day: float | None = _setting(
        None,
        env="FLEXKV_SSD_WRITE_GB_PER_DAY",
        unit="GiB per 24 hours",
        help=(
            "The most to write to all directories together in any 24 hours, restarts included, to "
            "spare the drives. Blocks beyond the limit stay in host memory only. Default: no limit."
        ),
        parse=parse_number(_LEAST_GIB, _MOST_GIB),
        allowed=_SIZE,
    )
    ssd_in_use: str = _setting(
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
    ssd_other_models: str = _setting(
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
    ssd_timeout_seconds: float = _setting(
        1.0,
        env="FLEXKV_SSD_TIMEOUT_SECONDS",
        unit="seconds",
        help=(
            "The time limit for one read or write on disk. Blocks that a disk has not delivered by "
            "then are computed, and FlexKV skips the disk until it answers again."
        ),
        parse=parse_number(0.001, _DAY_SECONDS),
        allowed=f"a number from 0.001 to {_DAY_SECONDS:.0f}",
    )
    mooncake_master: str | None = _setting(
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
    mooncake_metadata: str | None = _setting(
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
    mooncake_protocol: str = _setting(
        "tcp",
        env="FLEXKV_MOONCAKE_PROTOCOL",
        unit="name",
        help="How nodes send blocks to each other.",
        parse=parse_name(("rdma", "tcp")),
        allowed="rdma, tcp",
    )
    mooncake_device: str = _setting(
        "",
        env="FLEXKV_MOONCAKE_DEVICE",
        unit="names",
        help="RDMA devices, separated by commas; empty for those that Mooncake finds.",
        parse=parse_devices,
        allowed="names of devices, separated by commas",
    )
    mooncake_segment_gb: float = _setting(
        1.0,
        env="FLEXKV_MOONCAKE_SEGMENT_GB",
        unit="GiB",
        help=(
            "Host memory that this engine lends to the Mooncake Store, beside `cpu_cache_gb`. "
            "The blocks in it are lost when the engine ends."
        ),
        parse=parse_number(0.0, _MOST_GIB),
        allowed=f"a number from 0 to {_MOST_GIB:.0f}",
    )
    mooncake_replicas: int = _setting(
        1,
        env="FLEXKV_MOONCAKE_REPLICAS",
        unit="copies",
        help="On how many nodes the Mooncake Store keeps each block.",
        parse=parse_whole(1, _MOST_REPLICAS),
        allowed=f"a whole number from 1 to {_MOST_REPLICAS}",
    )
    mooncake_admission: str = _setting(
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
    mooncake_question_seconds: float = _setting(
        0.005,
        env="FLEXKV_MOONCAKE_QUESTION_SECONDS",
        unit="seconds",
        help=(
            "How long a request waits for the Mooncake Store to say which of its blocks are "
            "there. Blocks that it has not answered for by then are computed."
        ),
        parse=parse_number(0.0001, _DAY_SECONDS),
        allowed=f"a number from 0.0001 to {_DAY_SECONDS:.0f}",
    )
    mooncake_timeout_seconds: float = _setting(
        1.0,
        env="FLEXKV_MOONCAKE_TIMEOUT_SECONDS",
        unit="seconds",
        help=(
            "How long the Mooncake Store may take for one read or write. Blocks that do not come "
            "by then are computed, and the store is left out until it answers again."
        ),
        parse=parse_number(0.001, _DAY_SECONDS),
        allowed=f"a number from 0.001 to {_DAY_SECONDS:.0f}",
    )
    objects_url: str | None = _setting(
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
    objects_admission: str = _setting(
        "write_through",
        env="FLEXKV_OBJECTS_ADMISSION",
        unit="name",
        help="Which blocks are written to the bucket; the names are those of `ssd_admission`.",
        parse=parse_name(ADMISSIONS),
        allowed=", ".join(ADMISSIONS),
    )
    objects_question_seconds: float = _setting(
        0.05,
        env="FLEXKV_OBJECTS_QUESTION_SECONDS",
        unit="seconds",
        help=(
            "How long a request waits for the bucket to say which of its blocks are there. Blocks "
            "that the bucket has not answered for by then are computed."
        ),
        parse=parse_number(0.001, _DAY_SECONDS),
        allowed=f"a number from 0.001 to {_DAY_SECONDS:.0f}",
    )
    objects_timeout_seconds: float = _setting(
        5.0,
        env="FLEXKV_OBJECTS_TIMEOUT_SECONDS",
        unit="seconds",
        help=(
            "How long the bucket may take for one read or write. Blocks that do not come by then "
            "are computed, and the bucket is left out until it answers again."
        ),
        parse=parse_number(0.001, _DAY_SECONDS),
        allowed=f"a number from 0.001 to {_DAY_SECONDS:.0f}",
    )
    block_tokens: int | None = _setting(
        None,
        env="FLEXKV_BLOCK_TOKENS",
        unit="tokens",
        help=(
            "Tokens of one FlexKV block, the unit of lookup, eviction and copies; a multiple of "
            "the engine's block size. Small blocks waste less of a prompt's tail; large blocks "
            "cost less to manage. Default: the smallest multiple whose block over all layers and "
            "ranks has 2 MiB, at most 128 tokens, at least one engine block."
        ),
        parse=parse_whole(1, _MOST_BLOCK_TOKENS),
        allowed=(
            f"a whole number from 1 to {_MOST_BLOCK_TOKENS}, a multiple of the engine's block size"
        ),
    )
    load_mode: str = _setting(
        "async",
        env="FLEXKV_LOAD_MODE",
        unit="name",
        help=(
            "How blocks are loaded from host memory into the engine. `async`: before the request "
            "computes, while other requests compute. `layerwise`: beside the forward pass of the "
            "same step, which waits for the blocks layer by layer; all requests of that step wait "
            "with it. `auto`: the faster of the two by measured load times; on a GPU not layerwise "
            "if other requests would wait longer than one step. Layerwise loads need vLLM's "
            "`--no-async-scheduling`, and make vLLM use PIECEWISE CUDA graphs. Models with several "
            "kinds of attention are always loaded `async`."
        ),
        parse=parse_name(LOAD_MODES),
        allowed=", ".join(LOAD_MODES),
    )
    min_load_tokens: int = _setting(
        0,
        env="FLEXKV_MIN_LOAD_TOKENS",
        unit="tokens",
        help=(
            "Hits of fewer tokens are computed instead of loaded. In addition, FlexKV measures how "
            "long computing and loading take, and loads a hit only if that is faster."
        ),
        parse=parse_whole(0, _MOST_TOKENS),
        allowed=f"a whole number from 0 to {_MOST_TOKENS}",
    )
    pin_seconds: int = _setting(
        3600,
        env="FLEXKV_PIN_SECONDS",
        unit="seconds",
        help=(
            "How long pinned blocks stay in host memory, unless the request sets a time of its "
            "own. Each request that pins the blocks again restarts the time."
        ),
        parse=parse_whole(1, MOST_PIN_SECONDS),
        allowed=f"a whole number from 1 to {MOST_PIN_SECONDS}",
    )
    always_load: bool = _setting(
        False,
        env="FLEXKV_ALWAYS_LOAD",
        unit="boolean",
        help=(
            "Load every hit, even if the load is expected to take longer than computing. The "
            "request waits longer, but the processor is free for other requests."
        ),
        parse=parse_bool,
        allowed="1, 0, true, false, yes, no, on, off",
    )
    copy_threads: int | None = _setting(
        None,
        env="FLEXKV_COPY_THREADS",
        unit="threads",
        help=(
            "Threads per worker process that copy between the engine's pages and host memory. They "
            "are used only if the engine's tensors are in host memory. Default: 4, or the number "
            "of usable cores if that is less."
        ),
        parse=parse_whole(1, _MOST_THREADS),
        allowed=f"a whole number from 1 to {_MOST_THREADS}",
    )
    runtime_dir: str | None = _setting(
        None,
        env="FLEXKV_RUNTIME_DIR",
        unit="absolute path",
        help=(
            "Directory where the processes of one engine find each other by small files. FlexKV "
            "removes them at shutdown; the next start removes those of a killed engine. Only this "
            "user may have the right to write to the directory. Others may not have it for any "
            "directory above that is neither root's nor sticky. Default: `flexkv` in "
            "XDG_RUNTIME_DIR if that is this user's with mode 0700, else /dev/shm/flexkv-UID, or "
            "the temporary directory if there is no /dev/shm."
        ),
        parse=parse_directory,
        allowed="an absolute path of a directory that only this user can write to",
    )
    trace: str | None = _setting(
        None,
        env="FLEXKV_TRACE",
        unit="absolute path",
        help=(
            "A file to record requests to, for `flexkv plan`: salted digests of blocks, lengths "
            "and times, no text. Only this user can read it. An engine adds to a recording that is "
            "there; each engine needs a file of its own. Default: nothing is recorded."
        ),
        parse=parse_directory,
        allowed="an absolute path of a new file, or of a recording of this user",
    )
    trace_gb: float = _setting(
        1.0,
        env="FLEXKV_TRACE_GB",
        unit="GiB",
        help=(
            "How large the file of `trace` may become; then recording ends. A request takes about "
            "100 bytes, and 16 for each of its blocks."
        ),
        parse=parse_number(_LEAST_GIB, _MOST_GIB),
        allowed=_SIZE,
    )
    log_level: str = _setting(
        "INFO",
        env="FLEXKV_LOG_LEVEL",
        unit="name",
        help="The lowest level of messages that FlexKV writes to the engine's log.",
        parse=parse_log_level,
        allowed=", ".join(LOG_LEVELS),
    )
    allow_untested_engine: bool = _setting(
        False,
        env="FLEXKV_ALLOW_UNTESTED_ENGINE",
        unit="boolean",
        help="Start with an engine version outside the supported range, at your own risk.",
        parse=parse_bool,
        allowed="1, 0, true, false, yes, no, on, off",
    )

    @property
    def names_lower_tier(self) -> bool:
        """Whether blocks are kept beyond the process, on disk or in a shared store."""
        stores = (self.ssd_cache_gb, self.mooncake_master, self.objects_url)
        return any(each is not None for each in stores)

    @property
    def session_root(self) -> str:
        """The runtime directory in force."""
        return self.runtime_dir or default_runtime_dir()


def settings() -> Iterator[dataclasses.Field[Any]]:
    """The fields of `CacheConfig`; each one's metadata holds env, unit, help and allowed."""
    return iter(dataclasses.fields(CacheConfig))


def configure_logging(config: CacheConfig) -> None:
    """Set the level of the `flexkv` loggers, and add a handler if the engine has set none up."""
    logger = logging.getLogger("flexkv")
    level = logging.CRITICAL + 1 if config.log_level == "OFF" else config.log_level
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [FlexKV] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
