# SPDX-License-Identifier: Apache-2.0
"""All that a block's bytes depend on apart from its key: model, weights, engine.

Blocks on disk outlive the engine. An engine finds them again only if all of this is the same.
SGLang's page hashes cover the tokens and, by `extra_key` and `cache_salt`, the tenant and the LoRA
adapter, but nothing of what is here.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from flexkv.engine.weights import (
    adapter_stamps,
    code_traits,
    configuration_digest,
    digest,
    text_of_file,
    weight_files,
    weight_traits,
)

logger = logging.getLogger("flexkv.sglang")

_DUMMY = "dummy"
"""SGLang's `--load-format` of random weights, which depend on its seed."""

_NAMED = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "torchao_config",
    "attention_backend",
    "prefill_attention_backend",
    "page_size",
)
"""Settings of SGLang that decide the bytes of a page."""

_NAMED_OF_DRAFT = (
    "speculative_algorithm",
    "speculative_draft_model_quantization",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_attention_backend",
    "speculative_draft_window_size",
    "speculative_draft_sink_size",
)
"""Settings of SGLang that decide the bytes of a draft's part of a page."""


def model_identity(settings: Any, model: Any, version: str, draft: Any = None) -> list[str]:
    """The parts of the fingerprint, each `NAME: VALUE`. Reads a small part of the model's files;
    see `file_stamps`. Where they lie does not count.

    Args:
        settings: SGLang's resolved settings.
        model: SGLang's configuration of the model.
        version: SGLang's version, because each release may order a page's bytes differently.
        draft: SGLang's configuration of the draft model; None if no draft keeps KV.
    """
    path, revision = str(settings.model_path), settings.revision
    scales = getattr(settings, "quantization_param_path", None)
    return [
        f"engine: sglang {version}",
        *_cpu_traits(settings),
        f"configuration: {configuration_digest(model.hf_config.to_json_string())}",
        *weight_traits(path, revision, str(settings.load_format)),
        *code_traits(path, revision, runs_code=bool(getattr(settings, "trust_remote_code", False))),
        *([f"seed: {settings.random_seed}"] if _is_dummy(settings) else []),
        *(f"{name}: {getattr(settings, name, None)}" for name in _NAMED),
        f"scales: {text_of_file(scales)}",
        f"adapters: {digest(_adapters(settings.lora_paths or ()))}",
        *([] if draft is None else _draft_traits(settings, draft)),
    ]


def served_model(settings: Any) -> str:
    """The name by which SGLang serves the model."""
    return str(getattr(settings, "served_model_name", None) or settings.model_path)


def draft_model(settings: Any) -> tuple[str, str | None]:
    """Path or name of the draft model and its revision. A draft without a path is a part of the
    target's weights (MTP)."""
    path = getattr(settings, "speculative_draft_model_path", None)
    if path:
        return str(path), getattr(settings, "speculative_draft_model_revision", None)
    return str(settings.model_path), settings.revision


def _draft_traits(settings: Any, draft: Any) -> list[str]:
    path, revision = draft_model(settings)
    runs_code = bool(getattr(settings, "trust_remote_code", False))
    traits = [
        f"configuration: {configuration_digest(draft.hf_config.to_json_string())}",
        *weight_traits(path, revision, _draft_format(settings)),
        *code_traits(path, revision, runs_code=runs_code),
        *(f"{name}: {getattr(settings, name, None)}" for name in _NAMED_OF_DRAFT),
    ]
    return [f"draft: {trait}" for trait in traits]


def _draft_format(settings: Any) -> str:
    """SGLang's name of the format of the draft's weights: that of the target's unless set."""
    own = getattr(settings, "speculative_draft_load_format", None)
    return str(own or settings.load_format)


def outlives_process(settings: Any, draft: Any = None) -> bool:
    """Whether blocks on disk are valid for the next process. If not, the reason is logged.

    Args:
        settings, draft: see `model_identity`.
    """
    models = [(str(settings.model_path), settings.revision, str(settings.load_format))]
    if draft is not None:
        models.append((*draft_model(settings), _draft_format(settings)))
    for path, revision, load_format in models:
        if load_format != _DUMMY and not weight_files(path, revision):
            logger.warning(
                "FlexKV finds no weights of %r on this machine, neither in a directory nor in the "
                "Hugging Face cache, and cannot tell when they change: no block is kept on disk or "
                "shared",
                path,
            )
            return False
    return True


def _adapters(references: Iterable[Any]) -> list[str]:
    """The names and files of the LoRA adapters of the command line. SGLang derives adapter ids from
    names and paths alone, so a retrained adapter would find the old one's blocks. Adapters that are
    loaded later have unique ids."""
    parts = []
    for reference in references:
        path = Path(str(reference.lora_path))
        # Without local files, FlexKV cannot know whether the next process has the same weights.
        known = adapter_stamps(path) or [secrets.token_hex()]
        parts += [str(reference.lora_name), *known]
    return parts


def _is_dummy(settings: Any) -> bool:
    return _DUMMY in {str(settings.load_format), _draft_format(settings)}


def _cpu_traits(settings: Any) -> list[str]:
    """The processor's instruction set, by which SGLang's CPU kernels may differ."""
    if settings.device != "cpu":
        return []
    return [f"processor instructions: {torch.backends.cpu.get_cpu_capability()}"]
