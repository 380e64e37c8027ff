# SPDX-License-Identifier: Apache-2.0
"""Translates a configuration of LMCache into settings of FlexKV.

Forms that it knows: LMCache's own file, its variables, values of the Helm chart of vLLM's
production stack, and manifests of Kubernetes that set the variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flexkv.settings.setting import show

PREFIX = "LMCACHE_"
_DEFAULT_CPU_GB = 5.0
"""LMCache's own default of `max_local_cpu_size`."""
_TRUE = ("1", "true", "yes", "on")
_SHARE = "objects_url (a bucket or a shared folder), or mooncake_master with mooncake_metadata"
_PAIR = "MultiConnector with NixlConnector beside FlexKVConnectorV1 (its kv_role counts)"
_CHART = {
    "cpuOffloadingBufferSize": "max_local_cpu_size",
    "diskOffloadingBufferSize": "max_local_disk_size",
    "localCpu": "local_cpu",
    "maxLocalCpuSize": "max_local_cpu_size",
    "localDisk": "local_disk",
    "maxLocalDiskSize": "max_local_disk_size",
    "remoteUrl": "remote_url",
    "remoteSerde": "remote_serde",
    "chunkSize": "chunk_size",
    "enablePD": "enable_pd",
    "enableNixl": "enable_nixl",
    "nixlRole": "nixl_role",
    "kvRole": "kv_role",
    "logLevel": "log_level",
    "enableController": "enable_controller",
}
"""Names of the chart's `lmcacheConfig`, and LMCache's own."""
_NONE = {
    "enable_blending": "reuse of text that is no prefix",
    "enable_p2p": f"transfers from engine to engine; {_SHARE}",
    "enable_controller": "`flexkv stat`, `flexkv top` and the metrics report each engine",
    "enable_pd": _PAIR,
    "enable_nixl": _PAIR,
    "gds_path": "GPUDirect Storage; ssd_cache_gb and ssd_cache_dir go by way of host memory",
    "weka_path": "objects_url=file:///PATH",
    "save_unfull_chunk": "up to block_tokens - 1 tokens at the end of a prompt are computed",
    "external_lookup_client": "lookups in another process",
}
"""Switches that have no equivalent if they are on: what is missing or takes their place."""
_MOONCAKES = {
    "metadata_server": "mooncake_metadata",
    "protocol": "mooncake_protocol",
    "device_name": "mooncake_device",
}
"""Names of Mooncake's own settings, and FlexKV's."""
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
_NEEDLESS = (
    *("chunk_size", "pre_caching_hash_algorithm", "log_level", "use_experimental", "cache_policy"),
    *("lmcache_instance_id", "lmcache_worker_port", "worker_ports", "nixl_role", "enabled"),
    *("transfer_channel", "enable_xpyd", "rpc_port", "skip_last_n_tokens", "distributed_url"),
    *("instance_id", "worker_port", "lmcache_worker_ports", "blocking_timeout_secs"),
    *("enable_async_loading", "py_enable_gc", "numa_mode", "error_handling", "track_usage"),
)
_NEEDLESS_BEGINS = ("blend_", "controller_", "nixl_", "pd_", "p2p_", "internal_api_", "lookup_")


@dataclass(slots=True)
class Translation:
    """What a configuration becomes.

    Attributes:
        origin: where it was found.
        settings: FlexKV's settings, by name.
        role: vLLM's `kv_role`.
        notes: what to check about settings.
        missing: what has no equivalent.
        needless: names that need none.
    """

    origin: str
    settings: dict[str, Any] = field(default_factory=dict)
    role: str = "kv_both"
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    needless: list[str] = field(default_factory=list)


def from_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """LMCache's settings among variables."""
    return {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(PREFIX)
    }


def find(document: object, origin: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """LMCache's settings in a document, each with the place where they are."""
    if isinstance(document, Mapping):
        if _is_own(document):
            yield origin, {str(key): value for key, value in document.items()}
            return
        chart = document.get("lmcacheConfig")
        if isinstance(chart, Mapping):
            place = f"{origin}, lmcacheConfig of {document.get('name', 'the chart')}"
            found = {_own_name(str(key)): value for key, value in chart.items()}
            yield place, _in_list(document.get("env")) | found
        for key, value in document.items():
            if key != "lmcacheConfig" and (key != "env" or not isinstance(chart, Mapping)):
                yield from _with_server(find(value, origin), document)
    elif isinstance(document, list):
        if found := _in_list(document):
            yield f"{origin}, variables", found
        for each in document:
            yield from find(each, origin)


def _in_list(document: object) -> dict[str, Any]:
    """LMCache's settings among the variables of a container."""
    return from_variables(
        {
            str(each["name"]): str(each["value"])
            for each in (document if isinstance(document, list) else ())
            if isinstance(each, Mapping) and "name" in each and "value" in each
        }
    )


def _own_name(key: str) -> str:
    """LMCache's own name for one of the chart's."""
    return _CHART.get(key) or re.sub("([A-Z])", lambda found: f"_{found[1].lower()}", key)


def _with_server(
    found: Iterator[tuple[str, dict[str, Any]]], document: Mapping[Any, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings of engines with the server that the chart starts beside them, if it does."""
    server = document.get("cacheserverSpec")
    starts = isinstance(server, Mapping) and _is_on(server.get("enabled", True))
    for origin, given in found:
        yield origin, {"remote_url": "lm://cacheserverSpec"} | given if starts else given


def translate(origin: str, given: Mapping[str, Any], ranks: int) -> Translation:
    """Translate settings of LMCache.

    Args:
        origin: where they are.
        given: the settings, by LMCache's own names.
        ranks: worker processes of the engine. LMCache's sizes are for each of them.
    """
    made = Translation(origin)
    left = dict(given)
    _host(left, made, ranks)
    _disk(left, made, ranks)
    _remote(left, made)
    if _is_on(left.pop("use_layerwise", None)):
        made.settings["load_mode"] = "layerwise"
    if (least := left.pop("min_retrieve_tokens", None)) is not None:
        made.settings["min_load_tokens"] = least
    if (role := left.pop("kv_role", None)) in ("kv_producer", "kv_consumer"):
        made.role = str(role)
    if "save_decode_cache" in left and not _is_on(left.pop("save_decode_cache")):
        made.missing.append("save_decode_cache: answers are stored too (flexkv.max_store_tokens)")
    for name, value in left.items():
        if name in _NONE:
            if _is_on(value) or str(value).startswith("/"):
                made.missing.append(f"{name}: {_NONE[name]}")
        elif name in _NEEDLESS or name.startswith(_NEEDLESS_BEGINS):
            made.needless.append(name)
        else:
            made.missing.append(f"{name}: unknown to this command ({_shown(value)})")
    return made


def _host(left: dict[str, Any], made: Translation, ranks: int) -> None:
    size = _number(left.pop("max_local_cpu_size", _DEFAULT_CPU_GB))
    if not _is_on(left.pop("local_cpu", True)) or not size:
        made.notes.append("local_cpu is off: FlexKV needs host memory, as a stage for its tiers")
        size = 0.0
    if size:
        made.settings["cpu_cache_gb"] = plain(size * ranks)
        if ranks == 1:
            made.notes.append("cpu_cache_gb is for all ranks, LMCache's size for each: --ranks N")


def _disk(left: dict[str, Any], made: Translation, ranks: int) -> None:
    size = _number(left.pop("max_local_disk_size", 0))
    place = left.pop("local_disk", None)
    folders = [] if place is None else re.split("[,;]", str(place).removeprefix("file://"))
    paths = [each.removeprefix("file://") for each in folders if each.strip("/")]
    if not size:
        return
    made.settings["ssd_cache_gb"] = plain(size * ranks)
    absolute = [each for each in paths if each.startswith("/")]
    if absolute == paths != []:
        made.settings["ssd_cache_dir"] = ";".join(paths)
    else:
        made.notes.append("add ssd_cache_dir, the absolute path of a folder on a local drive")


def _remote(left: dict[str, Any], made: Translation) -> None:
    url = left.pop("remote_url", None)
    serde = left.pop("remote_serde", None)
    if serde not in (None, "naive"):
        made.missing.append(f"remote_serde: {show(serde)}: blocks are not compressed")
    if not url:
        return
    scheme, _, rest = str(url).partition("://")
    extra = left.get("extra_config")
    store = dict(extra) if scheme == "mooncakestore" and isinstance(extra, Mapping) else {}
    if store:
        del left["extra_config"]
    translated = _SCHEMES.get(scheme)
    if translated is None:
        made.missing.append(f"remote_url: {show(url)}: {_SHARE}")
    else:
        translated(rest, made, store)


def _mooncake(rest: str, made: Translation, extra: Mapping[str, Any]) -> None:
    made.settings["mooncake_master"] = extra.get("master_server_address") or rest.partition("/")[0]
    for theirs, ours in _MOONCAKES.items():
        if (value := extra.get(theirs)) not in (None, ""):
            made.settings[ours] = value
    if "mooncake_metadata" not in made.settings:
        made.notes.append("add mooncake_metadata: the metadata_server of your Mooncake Store")
    if (size := _bytes(extra.get("global_segment_size"))) is not None:
        made.settings["mooncake_segment_gb"] = plain(size / (1 << 30))
    else:
        made.notes.append("mooncake_segment_gb is the global_segment_size, 1 GiB by default")


def _bucket(rest: str, made: Translation, _: Mapping[str, Any]) -> None:
    made.settings["objects_url"] = f"s3://{rest.partition('.')[0].rstrip('/')}"
    made.notes.append("objects_url: the bucket's name; region and endpoint by AWS_... variables")


def _folder(rest: str, made: Translation, _: Mapping[str, Any]) -> None:
    folder_url(f"/{rest.partition('/')[2]}", made)


def folder_url(path: str, made: Translation) -> None:
    """A folder that engines share, by its absolute path."""
    made.settings["objects_url"] = f"file://{path}"
    made.notes.append("objects_url: the folder must be the engines' user's alone (mode 0700)")


_SCHEMES: Mapping[str, Callable[[str, Translation, Mapping[str, Any]], None]] = {
    "mooncakestore": _mooncake,
    "s3": _bucket,
    "fs": _folder,
    "file": _folder,
}


def _is_own(document: Mapping[Any, Any]) -> bool:
    """Whether a mapping is LMCache's own file."""
    own = ("chunk_size", "local_cpu", "max_local_cpu_size", "local_disk", "remote_url", "enable_pd")
    return any(name in document for name in own)


def _shown(value: object) -> str:
    """A value in a comment, without what names in it stand for, which may be secret."""
    if isinstance(value, Mapping):
        return f"names: {', '.join(map(str, value))}"
    return "not shown" if str(value).lstrip().startswith("{") else show(value)


def _is_on(value: object) -> bool:
    return str(value).strip().lower() in _TRUE


def _number(value: object) -> float:
    """A size in GB; 0 for what is no number."""
    try:
        return max(0.0, float(str(value)))
    except ValueError:
        return 0.0


def _bytes(value: object) -> int | None:
    """A size as Mooncake writes it, such as `80GB` or a number of bytes; None for no size."""
    found = re.fullmatch(r"([0-9]{1,18})\s*([KMGT]?B)?", str(value).strip().upper())
    return None if found is None else int(found[1]) * _UNITS[found[2] or "B"]


def plain(value: float) -> int | float:
    """A size without a needless fraction."""
    return int(value) if value == int(value) else value
