# SPDX-License-Identifier: Apache-2.0
"""The settings of FlexKV. `config_sources` reads them from where they may come from."""

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
    parse_directories,
    parse_directory,
    parse_log_level,
    parse_name,
    parse_number,
    parse_whole,
)

GIB = 1 << 30

_LEAST_GIB = 1e-6
"""About one memory page; tests use caches of some KiB."""
_MOST_GIB = float(1 << 20)
"""1 PiB, more than one machine has: a larger number is a mistake, in bytes perhaps."""
_SIZE = f"a number from {_LEAST_GIB} to {_MOST_GIB:.0f}"
_MOST_TOKENS = 1 << 30
MOST_PIN_SECONDS = 30 * 24 * 3600
_MOST_BLOCK_TOKENS = 1 << 20
_MOST_THREADS = 1024
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
    """`flexkv` in `XDG_RUNTIME_DIR` if that is this user's alone; else `/dev/shm/flexkv-<uid>`, or
    the same under the temporary directory where there is no shm."""
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
    """All settings. Build it with `load_config`, which reads and checks every source."""

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
            "Host memory for cached blocks, in GiB, for all ranks of an engine together. "
            "Taken and filled at start. Default: 16, or half of the memory that is available "
            "at start if that is less."
        ),
        parse=parse_number(_LEAST_GIB, _MOST_GIB),
        allowed=f"{_SIZE}, at most the memory that is available at start",
    )
    eviction_policy: str = _setting(
        "lru",
        env="FLEXKV_EVICTION_POLICY",
        unit="name",
        help=(
            "Which blocks leave the host memory first when it is full: `lru`, those used longest "
            "ago; `s3fifo`, those that no other request has found, so that many prompts that are "
            "asked once do not push out prompts that are asked often."
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
            "A hard bound on the bytes on disk; allocated at start. Blocks on disk survive the "
            "engine. Default: no disk is used."
        ),
        parse=parse_number(_LEAST_GIB, _MOST_GIB),
        allowed=f"{_SIZE}, at most the free space of the file systems, and ssd_cache_dir",
    )
    ssd_cache_dir: tuple[str, ...] = _setting(
        (),
        env="FLEXKV_SSD_CACHE_DIR",
        unit="absolute paths",
        help=(
            "Directories for cached blocks, several separated by `;`: best each on a local NVMe "
            "drive of its own, then blocks are spread over them. "
            "Default: none."
        ),
        parse=parse_directories,
        allowed="absolute paths separated by `;` (not `,` or `:`), none twice, and ssd_cache_gb",
    )
    ssd_admission: str = _setting(
        "write_through",
        env="FLEXKV_SSD_ADMISSION",
        unit="name",
        help=(
            "Which blocks are written to disk: `write_through`, all, once they are in host memory; "
            "`second_hit`, those that a request finds; `on_evict`, those that are "
            "about to leave host memory."
        ),
        parse=parse_name(ADMISSIONS),
        allowed=", ".join(ADMISSIONS),
    )
    ssd_write_gb_per_day: float | None = _setting(
        None,
        env="FLEXKV_SSD_WRITE_GB_PER_DAY",
        unit="GiB per 24 hours",
        help=(
            "What may be written to all directories together in any 24 hours, over restarts too, "
            "to spare the drives. Blocks beyond it stay in host memory only. Default: no limit."
        ),
        parse=parse_number(_LEAST_GIB, _MOST_GIB),
        allowed=_SIZE,
    )
    ssd_in_use: str = _setting(
        "error",
        env="FLEXKV_SSD_IN_USE",
        unit="name",
        help=(
            "What a second engine with the same model does when a directory is in use: `error`, "
            "refuse to start; `own`, keep a cache of its own there, of `ssd_cache_gb` too (as "
            "data-parallel engines need it)."
        ),
        parse=parse_name(("error", "own")),
        allowed="error, own",
    )
    ssd_other_models: str = _setting(
        "keep",
        env="FLEXKV_SSD_OTHER_MODELS",
        unit="name",
        help=(
            "What happens at start to folders of other models in `ssd_cache_dir` that no engine "
            "uses: `keep` them until the file system lacks room for this model's, those used "
            "longest ago leave first; or `remove` them all, so that a directory never has more "
            "than `ssd_cache_gb`."
        ),
        parse=parse_name(("keep", "remove")),
        allowed="keep, remove",
    )
    ssd_timeout_seconds: float = _setting(
        1.0,
        env="FLEXKV_SSD_TIMEOUT_SECONDS",
        unit="seconds",
        help=(
            "How long a disk may take for one read or write. What it does not give by then is "
            "computed, and it is left out until it answers again."
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
            "the engine's block size. Default: the smallest multiple whose block over all layers "
            "and ranks has 2 MiB, but not more than 128 tokens (and never less than one engine "
            "block): small blocks waste less of a prompt's tail, large ones cost less to manage."
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
            "How blocks come back from host memory into the engine: `async`, before the request is "
            "computed on, while others compute; `layerwise`, beside the forward of the same step, "
            "which waits for them layer by layer, and all requests of that step with it; `auto`, "
            "whichever is sooner by what loads were measured to take, and on a GPU not layerwise "
            "where others would wait longer than for a step. Layer by layer needs vLLM's "
            "`--no-async-scheduling`, and has vLLM use PIECEWISE CUDA graphs; models with several "
            "kinds of attention are loaded `async` in any case."
        ),
        parse=parse_name(LOAD_MODES),
        allowed=", ".join(LOAD_MODES),
    )
    min_load_tokens: int = _setting(
        0,
        env="FLEXKV_MIN_LOAD_TOKENS",
        unit="tokens",
        help=(
            "Hits of fewer tokens are computed instead. Beside this FlexKV measures how long "
            "computing and loading take, and loads only what comes sooner than it is computed."
        ),
        parse=parse_whole(0, _MOST_TOKENS),
        allowed=f"a whole number from 0 to {_MOST_TOKENS}",
    )
    pin_seconds: int = _setting(
        3600,
        env="FLEXKV_PIN_SECONDS",
        unit="seconds",
        help=(
            "How long the blocks of a request that pins them stay in host memory, unless the "
            "request says so itself; counted anew from each request that pins them."
        ),
        parse=parse_whole(1, MOST_PIN_SECONDS),
        allowed=f"a whole number from 1 to {MOST_PIN_SECONDS}",
    )
    always_load: bool = _setting(
        False,
        env="FLEXKV_ALWAYS_LOAD",
        unit="boolean",
        help=(
            "Load every hit, also one that is expected to take longer than computing it: the "
            "request waits, but the processor is free for others."
        ),
        parse=parse_bool,
        allowed="1, 0, true, false, yes, no, on, off",
    )
    copy_threads: int | None = _setting(
        None,
        env="FLEXKV_COPY_THREADS",
        unit="threads",
        help=(
            "Threads that copy between the engine's pages and host memory, per worker process, "
            "where the engine's tensors are in host memory themselves. Default: 4, or the number "
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
            "Where the processes of one engine find each other: small files, removed at shutdown; "
            "what a killed engine left is removed by the next start. "
            "Only this user may be able to write to it, nor may others to a directory above it "
            "that is neither root's nor sticky. Default: `flexkv` in XDG_RUNTIME_DIR if that is "
            "this user's with mode 0700, else /dev/shm/flexkv-UID, or the temporary directory "
            "where there is no /dev/shm."
        ),
        parse=parse_directory,
        allowed="an absolute path of a directory that only this user can write to",
    )
    log_level: str = _setting(
        "INFO",
        env="FLEXKV_LOG_LEVEL",
        unit="name",
        help="What FlexKV writes to the engine's log.",
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
    def session_root(self) -> str:
        """The runtime directory in force."""
        return self.runtime_dir or default_runtime_dir()


def settings() -> Iterator[dataclasses.Field[Any]]:
    """The fields of `CacheConfig`; each one's metadata holds env, unit, help and allowed."""
    return iter(dataclasses.fields(CacheConfig))


def configure_logging(config: CacheConfig) -> None:
    """Give the `flexkv` loggers their level, and a handler if the engine set none up."""
    logger = logging.getLogger("flexkv")
    level = logging.CRITICAL + 1 if config.log_level == "OFF" else config.log_level
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [FlexKV] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
