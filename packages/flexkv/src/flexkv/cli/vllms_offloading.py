# SPDX-License-Identifier: Apache-2.0
"""Translates vLLM's own offloading in the arguments of a manifest or of Helm values into settings
of FlexKV: `--kv-transfer-config` with `OffloadingConnector`, and `--kv-offloading-size`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from flexkv.cli.lmcaches_names import Translation, folder_url, plain
from flexkv.settings.setting import show

_OFFLOADING = "OffloadingConnector"
_BESIDE = "MultiConnector"
_SIZE = re.compile(r"--kv-offloading-size[=\s]+['\"]?([0-9.]{1,15})")
_MOST_TEXT = 1 << 20
"""The longest argument that is read, in characters."""
_GIB = 1 << 30
_ROLES = ("kv_producer", "kv_consumer")
_SHARED_FOLDERS = ("fs", "fs_python")
_NEEDLESS = (
    *("spec_name", "spec_module_path", "block_size", "threads_per_gpu", "lazy_offload"),
    *("n_read_threads", "n_write_threads", "eviction_policy", "read_preferring_ratio"),
    *("max_staging_memory_gb", "store_threshold", "max_tracker_size", "gpus_per_node"),
)


def find_offloading(document: object, origin: str) -> Iterator[Translation]:
    """What each engine of a document becomes that vLLM itself offloads from.

    Args:
        document: of a YAML file.
        origin: where it is.
    """
    if isinstance(document, Mapping):
        for value in document.values():
            yield from find_offloading(value, origin)
    elif isinstance(document, list):
        yield from _in_text("\n".join(each for each in document if isinstance(each, str)), origin)
        for each in document:
            if not isinstance(each, str):
                yield from find_offloading(each, origin)
    elif isinstance(document, str):
        yield from _in_text(document, origin)


def _in_text(text: str, origin: str) -> Iterator[Translation]:
    made = _translate(text[:_MOST_TEXT], f"{origin}, vLLM's arguments") if "--kv-" in text else None
    if made is not None:
        yield made


def _translate(text: str, origin: str) -> Translation | None:
    """The settings for vLLM's arguments; None if it offloads nothing."""
    made = Translation(origin)
    found = False
    for config in _configs(text):
        if config.get("kv_role") in _ROLES:
            made.role = config["kv_role"]
        for connector in _connectors(config):
            name = connector.get("kv_connector")
            if name == _OFFLOADING:
                found = True
                extra = connector.get("kv_connector_extra_config")
                _take(extra if isinstance(extra, Mapping) else {}, made)
            elif name != _BESIDE:
                made.missing.append(
                    f"kv_connector: {show(name)}: {_BESIDE} with it beside FlexKVConnectorV1"
                )
    if size := _SIZE.search(text):
        found = True
        _add_host(made, float(size[1].rstrip(".") or 0))
        made.notes.append("remove --kv-offloading-size: it replaces FlexKV's connector")
    return made if found else None


def _configs(text: str) -> Iterator[Mapping[str, Any]]:
    """The JSON objects in a text that name a connector, the outermost ones."""
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find("{", at)) >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        if isinstance(value, Mapping) and "kv_connector" in value:
            yield value
        at = end


def _connectors(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    extra = config.get("kv_connector_extra_config")
    parts = extra.get("connectors") if isinstance(extra, Mapping) else None
    for each in parts if isinstance(parts, list) else ():
        if isinstance(each, Mapping):
            yield each


def _take(extra: Mapping[str, Any], made: Translation) -> None:
    left = dict(extra)
    if (size := left.pop("cpu_bytes_to_use", None)) is not None:
        _add_host(made, float(size) / _GIB if isinstance(size, int | float) else 0.0)
    if (blocks := left.pop("num_cpu_blocks", None)) is not None:
        made.notes.append(f"add cpu_cache_gb: num_cpu_blocks ({show(blocks)}) counts blocks")
    if (path := left.pop("shared_storage_path", None)) is not None:
        _add_folder(made, path)
    tiers = left.pop("secondary_tiers", ())
    for tier in tiers if isinstance(tiers, list) else ():
        if isinstance(tier, Mapping) and tier.get("type") in _SHARED_FOLDERS:
            _add_folder(made, tier.get("root_dir"))
        else:
            made.missing.append(f"secondary_tiers: {show(tier)}: objects_url or mooncake_master")
    for name, value in left.items():
        if name in _NEEDLESS:
            made.needless.append(name)
        else:
            made.missing.append(f"{name}: unknown to this command ({show(value)})")


def _add_host(made: Translation, size: float) -> None:
    if size > 0:
        made.settings["cpu_cache_gb"] = plain(size)


def _add_folder(made: Translation, path: object) -> None:
    if isinstance(path, str) and path.startswith("/"):
        folder_url(path, made)
    else:
        made.notes.append(f"add objects_url=file:///PATH: the folder is {show(path)}")
