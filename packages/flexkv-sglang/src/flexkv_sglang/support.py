# SPDX-License-Identifier: Apache-2.0
"""Refuses, at start and with one message, the features of SGLang that FlexKV cannot cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from flexkv.types.errors import ConfigError, LayoutError

_ONE = {
    "nnodes": "--nnodes",
    "attn_cp_size": "--attn-cp-size (--attention-context-parallel-size)",
    "dcp_size": "--dcp-size (--decode-context-parallel-size)",
}
"""SGLang's sizes of the kinds of parallelism that FlexKV does not support, by their names in
SGLang's settings: the flags. With them, the ranks that hold a token's pages do not go in step or
are on several machines."""

_ON_DEVICE = "SGLang's prefix cache on the device"
_OWN_POOL = "pages that keep their place on the device"
_WHOLE_STATES = "states as the model computes on them"
_BY_SLOT = "answers without what SGLang keeps of each slot, and not of the pages that are loaded"
_OFF = {
    "enable_hierarchical_cache": ("--enable-hierarchical-cache (--enable-hicache)", _ON_DEVICE),
    "enable_lmcache": ("--enable-lmcache", _ON_DEVICE),
    "enable_hisparse": ("--enable-hisparse", _OWN_POOL),
    "enable_unified_memory": ("--enable-unified-memory", _OWN_POOL),
    "enable_kv_cache_sharding": ("--enable-kv-cache-sharding", _OWN_POOL),
    "enable_int8_mamba_checkpoint": ("--enable-int8-mamba-checkpoint", _WHOLE_STATES),
    "enable_linear_replayssm": ("--enable-linear-replayssm", _WHOLE_STATES),
    "enable_linear_replayssm_spec": ("--enable-linear-replayssm-spec", _WHOLE_STATES),
    "enable_return_routed_experts": ("--enable-return-routed-experts", _BY_SLOT),
    "enable_return_indexer_topk": ("--enable-return-indexer-topk", _BY_SLOT),
    "prefill_only_disable_kv_cache": ("--prefill-only-disable-kv-cache", "a KV cache"),
    "disaggregation_decode_enable_offload_kvcache": (
        "--disaggregation-decode-enable-offload-kvcache",
        "none, because FlexKV stores the answers",
    ),
    "enable_pd_role_switch": ("--enable-pd-role-switch", "servers that keep their role"),
}
"""SGLang's switches that must be off: the flag of each, and what FlexKV allows instead."""

_UNSET = {
    "radix_cache_backend": "--radix-cache-backend",
    "hicache_storage_backend": "--hicache-storage-backend",
}
"""SGLang's names of other caches, and their flags."""

_WITHOUT_STAGES = (
    ("speculative_algorithm", "--speculative-algorithm", None),
    ("disaggregation_mode", "--disaggregation-mode", "null"),
)
"""SGLang's settings that must not be set together with pipeline stages: name, flag, and the value
that stands for none."""

_STAGES = "--pp-size (--pipeline-parallel-size)"
_APART = "the model of --model-path has sliding windows or recurrent states"

_DRAFTS = ("EAGLE", "EAGLE3", "STANDALONE")
"""Values of `--speculative-algorithm` whose draft keeps KV in pages with the target's numbers."""

_WITH_SCALES = ("mxfp8", "nvfp4", "fp4_mx_block16")
"""Values of `--kv-cache-dtype` with which SGLang keeps scales beside the pages."""


def load_page_hash() -> None:
    """Have SGLang load its page hash now. Otherwise SGLang builds it at the first prompt of a whole
    page: that stops all requests for seconds, and ends the server where it fails. Raises
    ConfigError if SGLang cannot load it. The message names the cause."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    try:
        get_storage_hash_str([0], None, page_size=1)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ConfigError(
            f"SGLang's page hash (hicache_hash_cpp), whose hashes are FlexKV's keys, cannot be "
            f"loaded: {cause}; allowed with FlexKV: a C++ compiler and OpenSSL's libcrypto when "
            f"SGLang starts, or a folder TORCH_EXTENSIONS_DIR in which SGLang has built it before"
        ) from error


def check_settings(settings: Any) -> None:
    """Refuse settings of SGLang, as the user wrote them or as SGLang has resolved them, with which
    FlexKV cannot cache pages. Raises ConfigError if a setting is not allowed. The message names it,
    its value and the allowed one."""
    for name, flag in _ONE.items():
        value = getattr(settings, name, 1)
        if value not in {None, 1}:
            _refuse(f"{flag} is {value}", "1")
    stages = getattr(settings, "pp_size", 1) or 1
    for name, flag, none in _WITHOUT_STAGES if stages > 1 else ():
        value = getattr(settings, name, None)
        if value not in {None, none}:
            _refuse(f"{_STAGES} is {stages} with {flag} {value}", f"1, or no {flag}")
    _check_decode(settings)
    for name, (flag, allowed) in _OFF.items():
        if getattr(settings, name, False):
            _refuse(f"{flag} is set", allowed)
    for name, flag in _UNSET.items():
        value = getattr(settings, name, None)
        if value is not None:
            _refuse(f"{flag} is {value!r}", "none")
    if getattr(settings, "disable_radix_cache", False):
        _refuse(
            "prefix cache is off, by --disable-radix-cache or by SGLang's choice for this model",
            _ON_DEVICE,
        )
    algorithm = getattr(settings, "dllm_algorithm", None)
    if algorithm:
        allowed = "none, because diffusion models rewrite their pages"
        _refuse(f"--dllm-algorithm is {algorithm!r}", allowed)
    dtype = getattr(settings, "kv_cache_dtype", None)
    if dtype in _WITH_SCALES:
        _refuse(
            f"--kv-cache-dtype is {dtype}, which keeps scales beside the pages",
            f"any but {', '.join(_WITH_SCALES)}",
        )


def _check_decode(settings: Any) -> None:
    """Refuse a decode server (PD disaggregation) that does without the linker: SGLang would start
    it, and nothing would be cached."""
    if getattr(settings, "disaggregation_mode", "null") != "decode":
        return
    if not getattr(settings, "disaggregation_decode_enable_radix_cache", False):
        _refuse(
            "--disaggregation-mode is decode, which turns its prefix cache off",
            "also --disaggregation-decode-enable-radix-cache",
        )
    threshold = getattr(settings, "disaggregation_decode_host_receive_threshold", 1)
    if threshold < 1:
        _refuse(
            f"--disaggregation-decode-host-receive-threshold is {threshold:g}, with which "
            f"HiCache's host memory receives the pages",
            "1",
        )
    if getattr(settings, "disaggregation_decode_retraction_backup", None) == "host_pool":
        _refuse(
            "--disaggregation-decode-retraction-backup is host_pool, which HiCache keeps",
            "cpu_tensor, none",
        )


def check_model(settings: Any, model: Any) -> None:
    """Refuse a model and a draft that keep state in a way of their own, as far as that is known
    before SGLang has read weights; `check_cache` refuses the rest. Raises ConfigError if the
    settings name a draft whose KV FlexKV does not store; LayoutError if there is state of another
    kind. The message names it."""
    from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = SpeculativeAlgorithm.from_string(settings.speculative_algorithm)
    has_kv = algorithm.is_speculative() and algorithm.has_draft_kv()
    if has_kv and settings.speculative_algorithm not in _DRAFTS:
        _refuse(
            f"--speculative-algorithm is {settings.speculative_algorithm}, whose draft keeps KV "
            f"that FlexKV does not store",
            f"none, NGRAM, NEXTN, {', '.join(_DRAFTS)}",
        )
    if settings.model_impl == "transformers" and model.is_multimodal:
        _refuse(
            "--model-impl is transformers, with which its prefix cache is off for multimodal "
            "models",
            "auto, sglang",
        )
    if model.is_hybrid_swa and getattr(model, "is_hybrid_swa_compress", False):
        raise LayoutError(
            "the model of --model-path keeps windows of compressed states; allowed with FlexKV: "
            "full attention (MHA, MLA, DSA), and windows of keys and values"
        )
    has_windows_or_states = model.is_hybrid_swa or uses_ssm_state(model)
    if has_kv and has_windows_or_states:
        _refuse_draft(settings.speculative_algorithm)
    stages = getattr(settings, "pp_size", 1) or 1
    if stages > 1 and has_windows_or_states:
        _refuse(f"{_STAGES} is {stages} and {_APART}", "1")


def check_cache(components: Iterable[Any], params: Any) -> None:
    """Refuse a model that keeps state in a way of its own, by SGLang's components of the prefix
    cache, one for each kind of state, and its parameters. Raises LayoutError if there is state of
    another kind. The message names it."""
    if getattr(params, "disable", False):
        raise LayoutError(
            "SGLang's prefix cache is off for multimodal models that Transformers runs; allowed: a "
            "model of SGLang's own (--model-impl sglang)"
        )
    kinds = [each.name for each in components]
    unknown = sorted(set(kinds) - {"FULL", "SWA", "MAMBA"})
    if unknown:
        raise LayoutError(
            f"the model of --model-path keeps {', '.join(unknown)} beside full attention; allowed "
            f"with FlexKV: full attention (MHA, MLA, DSA), sliding windows, recurrent states"
        )
    side_states = ("mamba_ckpt_pool", "short_conv_pool", "ngram_pool")
    pools = [
        getattr(getattr(params, "req_to_token_pool", None), name, None) for name in side_states
    ]
    if any(getattr(pool, "enabled", True) for pool in pools if pool is not None):
        raise LayoutError(
            "the model of --model-path keeps other states beside its recurrent states; allowed "
            "with FlexKV: recurrent states alone"
        )
    drafts = ("mtp_draft_device_pools", "sidecar_draft_device_pools")
    if len(kinds) > 1 and any(getattr(params, name, ()) for name in drafts):
        _refuse_draft("set")
    if getattr(params, "mtp_draft_mamba_pools", ()):
        raise LayoutError(
            "the draft model (--speculative-algorithm) keeps Mamba states; allowed with FlexKV: a "
            "draft with full attention in all layers"
        )


def _refuse_draft(algorithm: str) -> NoReturn:
    """Refuse a draft that keeps KV beside a model with windows or states."""
    _refuse(
        f"--speculative-algorithm is {algorithm} and {_APART}",
        "one of both, NGRAM, or, with windows, --disable-hybrid-swa-memory of SGLang",
    )


def _refuse(what: str, allowed: str) -> NoReturn:
    raise ConfigError(f"SGLang's {what}; allowed with FlexKV: {allowed}")
