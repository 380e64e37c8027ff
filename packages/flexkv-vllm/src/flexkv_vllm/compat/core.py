# SPDX-License-Identifier: Apache-2.0
"""What differs between vLLM versions; for KV events see `compat.events`.

What the compatibility tests in compat-ci find not to fit is answered here, by looking for the
feature and not at the version.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from flexkv import EngineVersionError
from flexkv.engine.releases import Age
from flexkv.types.changes import Medium
from flexkv_vllm.compat.features import missing_features
from flexkv_vllm.compat.versions import CONNECTOR

logger = logging.getLogger("flexkv.vllm")


def check_version(allow_untested: bool, ours: type, version: str = vllm.__version__) -> None:
    """Refuse a vLLM that is too old, or newer than tested and without a feature that FlexKV uses.
    Raises EngineVersionError, which names the version, what is missing, the range and the setting.

    Args:
        ours: FlexKV's class that vLLM calls.
        version: vLLM's own version string. A development build without a number (0.0.0 or
            "dev") is taken for too old.
    """
    age = CONNECTOR.age(version)
    if age is Age.TESTED or (allow_untested and fences_get_through()):
        return
    missing = missing_features(ours) if age is Age.NEWER else []
    if age is Age.NEWER and not missing:
        return
    lacks = f"; it lacks {', '.join(missing)}" if missing else ""
    raise EngineVersionError(
        f"vLLM {version} is installed; allowed: {CONNECTOR}, a newer version with all features "
        f"that FlexKV uses, or any version from 0.19 on with allow_untested_engine=true "
        f"(FLEXKV_ALLOW_UNTESTED_ENGINE=1){lacks}"
    )


def warn_if_newer(version: str = vllm.__version__) -> None:
    """Log one warning if this vLLM is newer than all versions that FlexKV was tested with."""
    if CONNECTOR.age(version) is Age.NEWER:
        logger.warning(
            "vLLM %s is newer than all versions that FlexKV was tested with (%s). FlexKV starts, "
            "because this vLLM has all features that it uses; compare some answers with and "
            "without FlexKV",
            version,
            CONNECTOR,
        )


def fences_get_through() -> bool:
    """Whether workers get the step's orders before the blocks of preempted requests are reused.

    vLLM 0.18 hands `handle_preemptions` the ids of the requests alone.
    """
    return (
        "kv_connector_metadata"
        in inspect.signature(KVConnectorBase_V1.handle_preemptions).parameters
    )


@functools.cache  # the offloading connector asks for each block
def hit_source(medium: Medium) -> Any:
    """vLLM's name of a tier in its statistics, from 0.32 on. It has none for stores that nodes
    share but `EXTERNAL_UNSPECIFIED`."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    own = {Medium.HOST: CacheHitSource.HOST, Medium.DISK: CacheHitSource.DISK}
    return own.get(medium, CacheHitSource.EXTERNAL_UNSPECIFIED)


def hit_sources(tokens: Mapping[Medium, int]) -> dict[Any, int]:
    """Tokens of a hit by source, without zeros. vLLM asks for them from 0.32 on."""
    sources: Counter[Any] = Counter()
    for medium, count in tokens.items():
        sources[hit_source(medium)] += count
    return dict(+sources)


def fails_by_request() -> bool:
    """Whether a worker can report which request's load failed: from vLLM 0.30 on."""
    return hasattr(KVConnectorBase_V1, "get_transfer_results")


if TYPE_CHECKING:
    HybridConnector = base.SupportsHMA
else:
    HybridConnector = base.SupportsHMA if fails_by_request() else object
"""Base class that makes vLLM keep several KV cache groups apart for a connector. With older
releases vLLM merges them if it can, since it cannot handle failed loads of several groups."""


def passes_stages_on() -> bool:
    """Whether both of vLLM's model runners pass on connectors' reports from all stages of a
    pipeline. Without these reports, loads in the first stages would never end."""
    return hasattr(ModelRunnerOutput, "with_kv_conn_output_only")


def binds_pool() -> bool:
    """Whether vLLM shows a connector its blocks: from 0.22 on."""
    return hasattr(KVConnectorBase_V1, "bind_gpu_block_pool")


def reports_sleep() -> bool:
    """Whether vLLM tells a connector when it unmaps its KV pages: from 0.33 on."""
    return hasattr(KVConnectorBase_V1, "unregister_kv_caches")


def tells_states() -> bool:
    """Whether vLLM reports the block of each recurrent state to a connector: from 0.32 on."""
    return "kv_connector_block_state" in SchedulerOutput.__dataclass_fields__
