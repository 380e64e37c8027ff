# SPDX-License-Identifier: Apache-2.0
"""All that a block's bytes depend on apart from its key: model, weights, engine.

Blocks on disk outlive the engine. An engine finds them again only if all of this is the same.
SGLang's page hashes cover the tokens and, by `extra_key` and `cache_salt`, the tenant and the LoRA
adapter, but nothing of what is here.
"""

from __future__ import annotations

import logging
import os
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
    file_digests,
    processor_files,
    text_of_file,
    tokenizer_files,
    weight_files,
    weight_traits,
)

logger = logging.getLogger("flexkv.sglang")

_DUMMY = "dummy"
"""SGLang's `--load-format` of random weights, which depend on its seed."""

_EXAMINED_NAMES = """
    load_format lora_paths model_path quantization_param_path random_seed revision
    speculative_draft_load_format speculative_draft_model_path speculative_draft_model_revision
    tokenizer_path trust_remote_code
"""
_EXAMINED = frozenset(_EXAMINED_NAMES.split())
"""Settings of SGLang that `model_identity` looks behind."""

_HARMLESS_NAMES = """
    _radix_eviction_policy_explicitly_set _speculative_draft_quantization_explicitly_set
    _swa_full_tokens_ratio_explicitly_set abort_on_priority_when_disabled admin_api_key
    allow_auto_truncate allowed_media_domains api_key asr_max_buffer_seconds
    asr_max_concurrent_sessions attn_cp_size attn_dp_size base_gpu_id batch_notify_size
    bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token
    chat_template chunked_prefill_size completion_template
    constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
    constrained_json_whitespace_pattern cpu_offload_gb crash_dump_folder
    cuda_graph_backend_decode cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_config
    cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill
    cuda_graph_prefill_max_context custom_sigquit_handler dcp_size debug_cuda_graph
    decode_log_interval decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints
    decoupled_spec_rank default_chat_template_kwargs default_priority_value
    delete_ckpt_after_loading detokenizer_worker_num disable_cuda_graph
    disable_cuda_graph_padding disable_decode_cuda_graph disable_outlines_disk_cache
    disable_overlap_schedule disable_prefill_cuda_graph disable_priority_preemption
    disable_radix_cache disable_tokenizer_batch_decode disaggregation_bootstrap_port
    disaggregation_decode_allocation_policy disaggregation_decode_enable_offload_kvcache
    disaggregation_decode_enable_radix_cache disaggregation_decode_extra_slots
    disaggregation_decode_host_receive_threshold disaggregation_decode_polling_interval
    disaggregation_decode_retraction_backup disaggregation_enable_kv_checksum
    disaggregation_ib_device disaggregation_mode disaggregation_transfer_backend dist_init_addr
    dist_timeout download_dir dp_size dynamic_batch_tokenizer_batch_size
    dynamic_batch_tokenizer_batch_timeout elastic_ep_rejoin elastic_ep_scale_timeout
    enable_adaptive_dispatch_to_encoder enable_broadcast_mm_inputs_process enable_cache_report
    enable_cudagraph_gc enable_custom_logit_processor enable_draft_weights_cpu_backup
    enable_dynamic_batch_tokenizer enable_dynamic_chunking enable_flexkv
    enable_forward_pass_metrics enable_hierarchical_cache enable_http2
    enable_http_worker_reuseport enable_layerwise_nvtx_marker enable_linker_mla_dedup
    enable_lmcache enable_lora_overlap_loading enable_memory_saver enable_metrics
    enable_metrics_for_all_schedulers enable_mfu_metrics enable_mixed_chunk
    enable_mm_global_cache enable_p2p_check enable_pd_role_switch enable_prefill_delayer
    enable_prefix_mm_cache enable_priority_scheduling enable_profile_cuda_graph
    enable_request_time_stats_logging enable_response_store enable_return_hidden_states
    enable_return_indexer_topk enable_return_routed_experts enable_session_radix_cache
    enable_ssl_refresh enable_streaming_session enable_strict_thinking
    enable_tokenizer_batch_encode enable_trace enable_unified_cache_external_linker
    enable_watermark enable_weights_cpu_backup encoder_bootstrap_port encoder_register_urls
    encoder_transfer_backend encoder_urls engine_info_bootstrap_port ep_size
    expert_balancedness_report_mode expert_distribution_recorder_buffer_size
    expert_distribution_recorder_mode export_metrics_to_file export_metrics_to_file_dir
    extra_metric_labels fastapi_root_path file_storage_path flexkv_config_file
    forward_pass_metrics_ipc_name forward_pass_metrics_worker_id gated_launch_port gc_threshold
    gc_warning_threshold_secs generation_tokens_buckets gpu_id_step grammar_backend grpc_mode
    grpc_port grpc_response_timeout_secs grpc_worker_threads hf_chat_template_name
    hicache_host_memory_fraction hicache_host_memory_mode hicache_io_backend hicache_mem_layout
    hicache_ratio hicache_size hicache_storage_backend hicache_storage_backend_extra_config
    hicache_storage_prefetch_policy hicache_storage_prefetch_retry_max_attempts
    hicache_storage_prefetch_retry_poll_interval hicache_write_policy host
    http2_initial_connection_window_size http2_max_concurrent_streams
    incremental_streaming_output int8_mamba_ckpt_size keep_mm_feature_on_device kv_canary
    kv_canary_real_data kv_canary_sweep_interval kv_events_config limit_mm_data_per_request
    lmcache_config_file load_balance_method load_publish_endpoint load_snapshot_publish_interval
    log_level log_level_http log_requests log_requests_format log_requests_level
    log_requests_target lora_drain_wait_threshold lora_eviction_policy mamba_full_memory_ratio
    mamba_max_states_per_path mamba_track_interval max_loaded_loras max_lora_rank
    max_loras_per_batch max_mamba_cache_size max_prefill_tokens max_queued_requests
    max_running_requests max_total_tokens media_url_max_file_size_mb mem_fraction_static
    min_free_slots_delay mm_enable_dp_encoder mm_feature_transport mm_global_cache_backend
    mm_io_worker_num mm_preprocess_cache_size_mb mm_processor_worker_num model_checksum
    modelopt_checkpoint_save_path modelopt_export_path moe_dp_size mooncake_ib_device nccl_port
    nnodes node_rank num_continuous_decode_steps num_reserved_decode_tokens numa_node
    offload_group_size offload_mode offload_num_in_group offload_prefetch_step
    optimistic_prefill_attempts otlp_service_name otlp_traces_endpoint port pp_async_batch_depth
    pp_max_micro_batch_size pp_size pre_warm_nccl preferred_sampling_params
    prefill_decode_interval prefill_decode_interval_min_bs
    prefill_delayer_forward_passes_buckets prefill_delayer_max_delay_ms
    prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio
    prefill_delayer_token_usage_low_watermark prefill_delayer_wait_seconds_buckets
    prefill_max_requests priority_scheduling_preemption_threshold prompt_tokens_buckets
    radix_cache_backend radix_eviction_policy radix_eviction_policy_config reasoning_parser
    remote_instance_weight_loader_backend remote_instance_weight_loader_seed_instance_ip
    remote_instance_weight_loader_seed_instance_service_port
    remote_instance_weight_loader_send_weights_group_ports
    remote_instance_weight_loader_start_seed_via_transfer_engine retraction_policy
    return_hidden_states_mode return_input_ids return_output_ids sampling_backend
    sampling_defaults sampling_mask_max_tokens schedule_conservativeness
    schedule_low_priority_values_first schedule_policy scheduler_recv_interval served_model_name
    show_time_cost sidecar sidecar_args skip_server_warmup skip_tokenizer_init sleep_on_idle
    smg_grpc_mode smg_http_sidecar_port soft_watchdog_timeout spec_trace_dir
    speculative_accept_threshold_acc speculative_accept_threshold_single speculative_adaptive
    speculative_adaptive_config speculative_eagle_topk speculative_ngram_capacity
    speculative_ngram_external_corpus_max_tokens speculative_ngram_external_corpus_path
    speculative_ngram_external_sam_budget speculative_ngram_match_type
    speculative_ngram_max_bfs_breadth speculative_ngram_max_trie_depth
    speculative_ngram_min_bfs_breadth speculative_num_draft_tokens speculative_num_steps
    speculative_use_rejection_sampling ssl_ca_certs ssl_certfile ssl_keyfile
    ssl_keyfile_password startup_weight_load_mode stat_loggers stream_interval
    stream_response_default_include_usage strip_thinking_cache swa_full_tokens_ratio
    tokenizer_backend tokenizer_metrics_allowed_custom_labels
    tokenizer_metrics_custom_labels_header tokenizer_worker_num tool_call_parser tool_server
    torch_compile_max_bs tp_size trace_modules trust_request_chat_template
    unified_cache_external_linker_backend unified_cache_external_linker_config use_ray
    uvicorn_access_log_exclude_prefixes warmups watchdog_timeout watermark_config
    watermark_context_window watermark_default_enabled watermark_enforce_all watermark_key
    watermark_key_b watermark_max_probability watermark_mixing_probability weight_cache_socket
    weight_cache_timeout weight_loader_disable_mmap weight_loader_drop_cache_after_load
    weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""Settings of SGLang that change no byte of a page whose key is known, beyond the rounding that
also another batch changes. All others count."""

_HARMLESS_VARIABLE_NAMES = """
    ASCEND_NPU_PHY_ID EXA_API_KEY SGLANG_AUTO_NUMA_BIND SGLANG_BACKUP_PORT_BASE SGLANG_CACHE_DIR
    SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION SGLANG_CUTE_AOT_CACHE_DIR SGLANG_DG_CACHE_DIR
    SGLANG_DISABLE_OUTLINES_DISK_CACHE SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE
    SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION SGLANG_FORCE_SHUTDOWN SGLANG_HTTP_SERVER_APP_PATH
    SGLANG_INIT_NEW_TOKEN_RATIO SGLANG_IS_FIRST_RANK_ON_NODE SGLANG_IS_IN_CI SGLANG_IS_IN_CI_AMD
    SGLANG_MAX_NEW_TOKENS_LIMIT SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR SGLANG_MM_BUFFER_SIZE_MB
    SGLANG_MM_FEATURE_CACHE_MB SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS SGLANG_NUMA_BIND_V2
    SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS SGLANG_PORT SGLANG_RAY_BUNDLE_INDICES
    SGLANG_REQ_RUNNING_TIMEOUT SGLANG_REQ_WAITING_TIMEOUT SGLANG_RETRACT_DECODE_STEPS
    SGLANG_SET_CPU_AFFINITY SGLANG_TCP_STORE_PORT SGLANG_TIMEOUT_KEEP_ALIVE
    SGLANG_TORCH_PROFILER_DIR SGLANG_USE_CUDA_IPC_TRANSPORT SGLANG_VLM_CACHE_SIZE_MB
    SGLANG_WARMUP_TIMEOUT
"""
_HARMLESS_VARIABLES = frozenset(_HARMLESS_VARIABLE_NAMES.split())
_HARMLESS_KINDS = """
    MOONCAKE_ SGLANG_CUDA_COREDUMP SGLANG_DISAGGREGATION_ SGLANG_EXA_ SGLANG_FAILED_SESSION_
    SGLANG_GRPC_ SGLANG_HICACHE_ SGLANG_JIT_ SGLANG_LOG_ SGLANG_OTLP_ SGLANG_PREFILL_DELAYER_
    SGLANG_PROFILE_ SGLANG_SCHEDULER_ SGLANG_TEST_ SGLANG_TRACE_ SGLANG_ZMQ_
"""
"""Environment variables of SGLang that change no byte either: names, and beginnings of names."""

_DRAFT = "speculative_"
"""What names of settings begin with that decide the bytes of a draft's part of a page."""

_FROM_FILES_NAMES = """
    auto bitsandbytes dummy fastsafetensors gguf instanttensor layered mistral npcache
    presharded pt runai_streamer safetensors sharded_state
"""
_FROM_FILES = frozenset(_FROM_FILES_NAMES.split())
"""SGLang's `--load-format` of weights that are only those of the model's files, or of a seed."""

_FROM_ELSEWHERE_NAMES = """
    checkpoint_engine_wait_weights_before_ready custom_weight_loader forward_hooks
    kt_weight_path modelopt_checkpoint_restore_path rl_quant_profile uno_lora_path
    weight_cache_mode
"""
_FROM_ELSEWHERE = tuple(_FROM_ELSEWHERE_NAMES.split())
"""Settings of SGLang that bring weights, or code that changes what they compute, from elsewhere."""


def model_identity(settings: Any, model: Any, version: str, draft: Any = None) -> list[str]:
    """The parts of the fingerprint, each `NAME: VALUE`. Reads a small part of the model's files;
    see `file_stamps`. Where they lie does not count.

    Args:
        settings: as SGLang has resolved them.
        version: SGLang's, because each release may order a page's bytes differently.
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
        *(each for each in _counted(settings) if not each.startswith(_DRAFT)),
        *_variables(),
        f"scales: {text_of_file(scales)}",
        f"processor: {digest(file_digests(_processor_files(settings)))}",
        f"adapters: {digest(_adapters(settings.lora_paths or ()))}",
        *([] if draft is None else _draft_traits(settings, draft)),
    ]


def _counted(settings: Any) -> list[str]:
    """The settings that have a value, but those known not to change bytes. A file that a setting
    names counts by what it contains."""
    # A view of SGLang's settings has no fields of its own, but passes on which the settings have.
    fields = getattr(settings, "__struct_fields__", None)
    names = fields or getattr(settings, "__dataclass_fields__", None) or vars(settings)
    counted = sorted(set(names) - _EXAMINED - _HARMLESS)
    values = [(name, getattr(settings, name)) for name in counted]
    return [
        f"{name}: {text_of_file(value) if isinstance(value, str) else value}"
        for name, value in values
        if value is not None
    ]


def _variables() -> list[str]:
    """The environment variables of SGLang that are set, but those known not to change bytes. Other
    programs may set variables of such names, as Kubernetes does for a service."""
    try:
        from sglang.srt.environ import Envs
    except ImportError:  # before SGLang had a list of them
        return []
    return [
        f"{name}: {text_of_file(os.environ[name])}"
        for name in sorted(vars(Envs))
        if name in os.environ
        and name not in _HARMLESS_VARIABLES
        and not name.startswith(tuple(_HARMLESS_KINDS.split()))
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
        *(each for each in _counted(settings) if each.startswith(_DRAFT)),
    ]
    return [f"draft: {trait}" for trait in traits]


def _draft_format(settings: Any) -> str:
    """SGLang's name of the format of the draft's weights: that of the target's unless set."""
    own = getattr(settings, "speculative_draft_load_format", None)
    return str(own or settings.load_format)


def outlives_process(settings: Any, draft: Any = None) -> bool:
    """Whether blocks on disk are valid for the next process. If not, the reason is logged. See
    `model_identity`."""
    for name in _FROM_ELSEWHERE:
        value = getattr(settings, name, None)
        if value and value != "off":
            logger.warning(
                "FlexKV cannot tell when what %s=%r brings changes: no block is kept on disk or "
                "shared",
                name,
                value,
            )
            return False
    models = [(str(settings.model_path), settings.revision, str(settings.load_format))]
    if draft is not None:
        models.append((*draft_model(settings), _draft_format(settings)))
    for path, revision, load_format in models:
        if load_format not in _FROM_FILES:
            logger.warning(
                "SGLang's --load-format is %r, whose weights FlexKV cannot tell from others: no "
                "block is kept on disk or shared",
                load_format,
            )
            return False
        if load_format != _DUMMY and not weight_files(path, revision):
            logger.warning(
                "FlexKV finds no weights of %r on this machine, neither in a directory nor in the "
                "Hugging Face cache, and cannot tell when they change: no block is kept on disk or "
                "shared",
                path,
            )
            return False
    return True


def _processor_files(settings: Any) -> list[Path]:
    """The files by which SGLang normalizes tokens, which choose embeddings of some models, and
    prepares images, which callers may name by hashes of their own."""
    path = str(getattr(settings, "tokenizer_path", None) or settings.model_path)
    return [
        *tokenizer_files(path, settings.revision),
        *processor_files(path, settings.revision),
    ]


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
