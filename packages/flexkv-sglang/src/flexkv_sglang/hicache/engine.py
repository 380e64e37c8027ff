# SPDX-License-Identifier: Apache-2.0
"""What HiCache does not tell its storage backend, and SGLang knows."""

from __future__ import annotations

import importlib

from sglang import __version__ as sglang_version
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import get_server_args

from flexkv.errors import EngineVersionError
from flexkv_sglang.compat import STORAGE
from flexkv_sglang.identity import model_identity, outlives_process

_NAMES_TENANTS = "storage_namespace_seed"


def check_engine() -> None:
    """Refuse an SGLang whose HiCache gives pages of different tenants one name.

    Raises:
        EngineVersionError: names the version and what is allowed.
    """
    hashes = importlib.import_module("sglang.srt.mem_cache.utils")
    if not hasattr(hashes, _NAMES_TENANTS):
        raise EngineVersionError(
            f"SGLang {sglang_version} is installed, whose HiCache names pages by their tokens "
            f"alone, so that requests of another extra_key or LoRA adapter would be given them; "
            f"allowed: {STORAGE}"
        )


def model_traits() -> list[str]:
    """What makes the bytes of a page what they are, apart from its key, its pool and the rank."""
    settings = get_server_args()
    return model_identity(settings, ModelConfig.from_server_args(settings), sglang_version)


def keeps_on_disk() -> bool:
    """Whether pages on disk mean the same to the next process. If not, logs why."""
    return outlives_process(get_server_args())


def engine_copies() -> int:
    """Engines with the same model beside each other."""
    return int(get_server_args().dp_size or 1)
