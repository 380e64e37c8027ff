# SPDX-License-Identifier: Apache-2.0
"""Reads from SGLang what a storage backend needs and HiCache does not pass."""

from __future__ import annotations

import importlib

from sglang import __version__ as sglang_version
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import get_server_args

from flexkv.types.errors import EngineVersionError
from flexkv_sglang.compat import STORAGE
from flexkv_sglang.identity import model_identity, outlives_process, served_model
from flexkv_sglang.settings import engines_of

_NAMES_TENANTS = "storage_namespace_seed"


def check_engine() -> None:
    """Refuse an SGLang whose HiCache uses the same key for pages of different tenants.

    Raises:
        EngineVersionError: this SGLang is refused. The message names its version and the allowed
            ones.
    """
    hashes = importlib.import_module("sglang.srt.mem_cache.utils")
    if not hasattr(hashes, _NAMES_TENANTS):
        raise EngineVersionError(
            f"SGLang {sglang_version} is installed, whose HiCache names pages by their tokens "
            f"alone, so that requests with another extra_key or LoRA adapter would get them; "
            f"allowed: {STORAGE}"
        )


def model_traits() -> list[str]:
    """The parts of the fingerprint that do not depend on the pool or the rank: all that the bytes
    of a page depend on, except its key."""
    settings = get_server_args()
    return model_identity(settings, ModelConfig.from_server_args(settings), sglang_version)


def served_as() -> str:
    """The name by which SGLang serves the model."""
    return served_model(get_server_args())


def keeps_on_disk() -> bool:
    """Whether pages are valid in another process. If not, the reason is logged."""
    return outlives_process(get_server_args())


def engine_copies() -> int:
    """The number of engines with the same model beside each other (data parallelism)."""
    return engines_of(get_server_args())
