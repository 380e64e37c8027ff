# SPDX-License-Identifier: Apache-2.0
"""The differences between vLLM versions in KV events, whose fields were added one by one. This
module looks up the fields of the installed vLLM rather than infer them from its version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_events
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils

from flexkv.types.changes import Medium

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_STORAGE = getattr(kv_events, "MEDIUM_STORAGE", "STORAGE")
MEDIA = dict.fromkeys(Medium, _STORAGE) | {Medium.HOST: getattr(kv_events, "MEDIUM_CPU", "CPU")}
"""The names of media in vLLM's own connectors, which have one name for all storage. Stores that
nodes share emit no events; requests can allow loads from them by this name."""

_STORED_FIELDS = frozenset(kv_events.BlockStored.__struct_fields__)
_REMOVED_FIELDS = frozenset(kv_events.BlockRemoved.__struct_fields__)


def block_stored(**fields: Any) -> KVCacheEvent:
    """A `BlockStored` of this vLLM; fields that this vLLM lacks are left out."""
    return kv_events.BlockStored(**{k: v for k, v in fields.items() if k in _STORED_FIELDS})


def block_removed(**fields: Any) -> KVCacheEvent:
    """A `BlockRemoved` of this vLLM; fields that this vLLM lacks are left out."""
    return kv_events.BlockRemoved(**{k: v for k, v in fields.items() if k in _REMOVED_FIELDS})


def event_hash(block_hash: bytes) -> bytes | int:
    """A block hash as in events: an int of 64 bits if the user configured vLLM so."""
    name = kv_cache_utils.BlockHash(block_hash)
    converted: bytes | int = kv_cache_utils.maybe_convert_block_hash(name)
    return converted


def event_extra_keys(request: Request, begin: int, end: int) -> list[Any] | None:
    """The extra keys in vLLM's events (adapter, salt, images) of the block of these tokens, in a
    list. None if there are none."""
    keys = [kv_cache_utils.generate_block_hash_extra_keys(request, begin, end, 0)[0]]
    if not any(keys):
        return None
    convert = getattr(kv_cache_utils, "to_event_extra_keys", None)
    result: list[Any] | None = keys if convert is None else convert(keys)
    return result


def group_traits(kv_cache_config: KVCacheConfig | None) -> dict[int, dict[str, Any]]:
    """Fields of a `BlockStored` with the kind of layers of each group, by its number."""
    if kv_cache_config is None:
        return {}
    if not (
        hasattr(kv_cache_interface, "get_kv_cache_spec_kind")
        and hasattr(kv_cache_interface, "get_kv_cache_spec_sliding_window")
    ):
        return {}  # before 0.22
    kind = kv_cache_interface.get_kv_cache_spec_kind
    window = kv_cache_interface.get_kv_cache_spec_sliding_window
    return {
        number: {
            "kv_cache_spec_kind": kind(group.kv_cache_spec).value,
            "kv_cache_spec_sliding_window": window(group.kv_cache_spec),
        }
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
    }
