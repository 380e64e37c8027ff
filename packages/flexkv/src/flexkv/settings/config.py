# SPDX-License-Identifier: Apache-2.0
"""The settings of FlexKV. `config_sources` reads their values from all sources."""

from __future__ import annotations

import dataclasses
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flexkv.settings.kinds import (
    LOAD_MODES,
    LOG_LEVELS,
    parse_bool,
    parse_directory,
    parse_log_level,
    parse_name,
    parse_names,
    parse_number,
    parse_whole,
)
from flexkv.settings.setting import LEAST_GIB, MOST_GIB, SIZE, setting
from flexkv.settings.tier_settings import DiskSettings, HostSettings, StoreSettings

GIB = 1 << 30
"""Bytes of a GiB, the unit of all sizes in settings."""

# The largest values that settings take. A larger number is a mistake, such as another unit.
_MOST_TOKENS = 1 << 30
MOST_PIN_SECONDS = 30 * 24 * 3600
"""The longest time for which a setting or a request may pin blocks."""
PIN_OPTIONS = ("pin", "pin_seconds", "pin_name", "unpin")
FREE_OPTIONS = ("load", "store", "max_load_tokens", "load_mode", "session", "returns")
"""The parameters of requests, without their prefix. Those that do not pin concern little more than
the request that has them."""
_MOST_BLOCK_TOKENS = 1 << 20
_MOST_THREADS = 1024


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


@dataclass(frozen=True)
class CacheConfig(StoreSettings, DiskSettings, HostSettings):
    """All settings. `load_config` builds it from all sources and checks every value.

    The fields of the last base come first, here as on the settings page.
    """

    block_tokens: int | None = setting(
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
    load_mode: str = setting(
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
    min_load_tokens: int = setting(
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
    pin_seconds: int = setting(
        3600,
        env="FLEXKV_PIN_SECONDS",
        unit="seconds",
        help=(
            "How long blocks stay in host memory that a request pins (see `request_options`), "
            "unless it sets a time of its own. Each request that pins the blocks again restarts "
            "the time."
        ),
        parse=parse_whole(1, MOST_PIN_SECONDS),
        allowed=f"a whole number from 1 to {MOST_PIN_SECONDS}",
    )
    request_options: tuple[str, ...] = setting(
        FREE_OPTIONS,
        env="FLEXKV_REQUEST_OPTIONS",
        unit="names",
        help=(
            "The parameters that requests may set, without `flexkv.`, separated by `,`; `all` and "
            "`none` stand for themselves. FlexKV ignores other parameters and logs them. Any "
            "client of the engine can send them. With `pin`, clients may keep up to half of the "
            "host memory for themselves, with `pin_seconds` for a time of their choice."
        ),
        parse=parse_names((*FREE_OPTIONS, *PIN_OPTIONS)),
        allowed=f"all, none, or names of {', '.join((*FREE_OPTIONS, *PIN_OPTIONS))}",
    )
    always_load: bool = setting(
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
    copy_threads: int | None = setting(
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
    runtime_dir: str | None = setting(
        None,
        env="FLEXKV_RUNTIME_DIR",
        unit="absolute path",
        help=(
            "Directory where the processes of one engine find each other by small files. FlexKV "
            "removes them at shutdown; the next start removes those of a killed engine. Only this "
            "user may have the right to write to the directory. Directories above must be root's "
            "or this user's, and others may not write to this user's unless they are sticky. "
            "Default: `flexkv` in "
            "XDG_RUNTIME_DIR if that is this user's with mode 0700, else /dev/shm/flexkv-UID, or "
            "the temporary directory if there is no /dev/shm."
        ),
        parse=parse_directory,
        allowed="an absolute path of a directory that only this user can write to",
    )
    trace: str | None = setting(
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
    trace_gb: float = setting(
        1.0,
        env="FLEXKV_TRACE_GB",
        unit="GiB",
        help=(
            "How large the file of `trace` may become; then recording ends. A request takes about "
            "100 bytes, and 16 for each of its blocks."
        ),
        parse=parse_number(LEAST_GIB, MOST_GIB),
        allowed=SIZE,
    )
    log_level: str = setting(
        "INFO",
        env="FLEXKV_LOG_LEVEL",
        unit="name",
        help="The lowest level of messages that FlexKV writes to the engine's log.",
        parse=parse_log_level,
        allowed=", ".join(LOG_LEVELS),
    )
    allow_untested_engine: bool = setting(
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
    def names_shared_store(self) -> bool:
        """Whether blocks are kept where other engines find them."""
        return self.mooncake_master is not None or self.objects_url is not None

    def without_shared_stores(self) -> CacheConfig:
        """The same settings without stores that engines share."""
        return dataclasses.replace(
            self, mooncake_master=None, mooncake_metadata=None, objects_url=None
        )

    @property
    def session_root(self) -> str:
        """Path of the runtime directory in force: `runtime_dir`, or its default."""
        return self.runtime_dir or default_runtime_dir()


def settings() -> Iterator[dataclasses.Field[Any]]:
    """The fields of `CacheConfig`, in the order of the settings page. The metadata of each field
    has the arguments of `setting` by name, without the default."""
    return iter(dataclasses.fields(CacheConfig))


def configure_logging(config: CacheConfig) -> None:
    """Set the level of the logger `flexkv` and those below it to `log_level`.

    If the logger has no handler, it gets one that writes to standard error, and its messages no
    longer reach the root logger.
    """
    logger = logging.getLogger("flexkv")
    level = logging.CRITICAL + 1 if config.log_level == "OFF" else config.log_level
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [FlexKV] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
