# SPDX-License-Identifier: Apache-2.0
"""The settings of FlexKV, and where they may come from.

Precedence, highest first: the engine's own command line (for vLLM
`kv_connector_extra_config`), the file that `FLEXKV_CONFIG_PATH` names, the environment, the
default. A key that does not exist is an error that names the nearest one that does.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from flexkv.admission import ADMISSIONS
from flexkv.errors import ConfigError
from flexkv.eviction import POLICIES
from flexkv.setting_values import (
    LOAD_MODES,
    LOG_LEVELS,
    parse_bool,
    parse_count,
    parse_directories,
    parse_directory,
    parse_log_level,
    parse_name,
    parse_positive_float,
    parse_positive_int,
)

CONFIG_PATH_VARIABLE = "FLEXKV_CONFIG_PATH"
GIB = 1 << 30


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
    """`/dev/shm/flexkv-<uid>`, or the same under the temporary directory where there is no shm."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return os.path.join(base, f"flexkv-{os.getuid()}")


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
        parse=parse_positive_float,
        allowed="a number above 0, at most the memory that is available at start",
    )
    eviction_policy: str = _setting(
        "lru",
        env="FLEXKV_EVICTION_POLICY",
        unit="name",
        help="Which blocks leave the host memory first when it is full.",
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
        parse=parse_positive_float,
        allowed="a number above 0, at most the free space of the file systems, and ssd_cache_dir",
    )
    ssd_cache_dir: tuple[str, ...] = _setting(
        (),
        env="FLEXKV_SSD_CACHE_DIR",
        unit="absolute paths",
        help=(
            "Directories for cached blocks, several separated by `;`: best each on a local NVMe "
            "drive of its own, then blocks are spread over them. In each, folders of models that "
            "no engine is using are removed to stay within the bound."
        ),
        parse=parse_directories,
        allowed="absolute paths separated by `;`, none twice, and ssd_cache_gb",
    )
    ssd_admission: str = _setting(
        "write_through",
        env="FLEXKV_SSD_ADMISSION",
        unit="name",
        help=(
            "Which blocks are written to disk: `write_through`, all, once they are in host memory; "
            "`second_hit`, those that are loaded from host memory; `on_evict`, those that are "
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
        parse=parse_positive_float,
        allowed="a number above 0",
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
    ssd_timeout_seconds: float = _setting(
        1.0,
        env="FLEXKV_SSD_TIMEOUT_SECONDS",
        unit="seconds",
        help=(
            "How long a disk may take for one read or write. What it does not give by then is "
            "computed, and it is left out until it answers again."
        ),
        parse=parse_positive_float,
        allowed="a number above 0",
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
        parse=parse_positive_int,
        allowed="a whole number above 0, a multiple of the engine's block size",
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
        parse=parse_count,
        allowed="a whole number from 0 on",
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
        parse=parse_positive_int,
        allowed="a whole number above 0",
    )
    runtime_dir: str | None = _setting(
        None,
        env="FLEXKV_RUNTIME_DIR",
        unit="absolute path",
        help=(
            "Where the processes of one engine find each other: small files, removed at shutdown; "
            "what a killed engine left is removed by the next start. "
            "Default: /dev/shm/flexkv-UID, or the temporary directory where there is no /dev/shm."
        ),
        parse=parse_directory,
        allowed="an absolute path of a directory that can be created and written",
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


def load_config(
    extra: Mapping[str, object] | None = None,
    extra_source: str = "kv_connector_extra_config",
    environ: Mapping[str, str] | None = None,
) -> CacheConfig:
    """Read all sources and return the settings in force.

    Args:
        extra: settings from the engine's own command line; they win over everything.
        extra_source: what to call `extra` in an error.
        environ: the environment; `os.environ` if None.

    Raises:
        ConfigError: a key is unknown, a value is malformed or out of range, or the file that
            `FLEXKV_CONFIG_PATH` names cannot be read. Names value, source and what is allowed.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    values.update(_from_environment(environ))
    path = environ.get(CONFIG_PATH_VARIABLE)
    if path:
        source = f"file {path} ({CONFIG_PATH_VARIABLE})"
        values.update(_from_mapping(_read_file(pathlib.Path(path)), source))
    values.update(_from_mapping(extra or {}, extra_source))
    config = CacheConfig(**values)
    if (config.ssd_cache_gb is None) != (not config.ssd_cache_dir):
        raise ConfigError(
            f"ssd_cache_gb is {config.ssd_cache_gb!r} and ssd_cache_dir is "
            f"{';'.join(config.ssd_cache_dir)!r}; allowed: both set, or neither"
        )
    return config


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    known = {CONFIG_PATH_VARIABLE}
    for setting in settings():
        name = setting.metadata["env"]
        known.add(name)
        text = environ.get(name)
        if text is not None and text != "":
            values[setting.name] = _parse(setting, text, f"environment variable {name}")
    for name in environ:
        if name.startswith("FLEXKV_") and name not in known:
            raise ConfigError(
                f"unknown environment variable {name}{_nearest(name, known)}; "
                f"allowed: {', '.join(sorted(known))}"
            )
    return values


def _from_mapping(mapping: Mapping[str, object], source: str) -> dict[str, Any]:
    by_name = {setting.name: setting for setting in settings()}
    values = {}
    for key, value in mapping.items():
        if key not in by_name:
            raise ConfigError(
                f"unknown key {key!r} in {source}{_nearest(str(key), by_name)}; "
                f"allowed: {', '.join(sorted(by_name))}"
            )
        if value is not None:
            values[key] = _parse(by_name[key], value, f"key {key!r} in {source}")
    return values


def _parse(setting: dataclasses.Field[Any], value: object, source: str) -> Any:
    try:
        return setting.metadata["parse"](value)
    except ValueError:
        raise ConfigError(
            f"{value!r} from {source} is not a valid {setting.name}; "
            f"allowed: {setting.metadata['allowed']}"
        ) from None


def _nearest(name: str, known: Mapping[str, object] | set[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _read_file(path: pathlib.Path) -> Mapping[str, object]:
    allowed = "a YAML or JSON file with one mapping of settings"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path} from {CONFIG_PATH_VARIABLE}: {error}; allowed: {allowed}"
        ) from None
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(
            f"{path} from {CONFIG_PATH_VARIABLE} cannot be parsed: {detail}; allowed: {allowed}"
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} from {CONFIG_PATH_VARIABLE} holds a {type(content).__name__}; "
            f"allowed: {allowed}"
        )
    return content


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
