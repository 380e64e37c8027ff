# SPDX-License-Identifier: Apache-2.0
"""Which settings of vLLM count in the fingerprint: all but those known to be harmless.

A harmless setting changes no byte of a block whose key is known, beyond the rounding that also
another batch changes. Harmless, too, are settings that `identity` looks behind, and those that
decide a layout, which the fingerprint has from the pages themselves.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from flexkv.engine.weights import text_of_file

_HARMLESS = {
    "VllmConfig": """
        aux_output_config ec_manager_config engram_config instance_id kv_events_config
        kv_transfer_config logging_config lora_config observability_config offload_config
        optimization_level performance_mode profiler_config quant_config reasoning_config
        scheduler_config shutdown_timeout speculative_config structured_outputs_config
        watchdog_config watermark_config weight_transfer_config
    """,
    "ModelConfig": """
        allow_deprecated_quantization allowed_local_media_path allowed_media_domains
        enable_cumem_allocator enable_nccl_comm_suspend enable_prompt_embeds
        enable_return_routed_experts enable_sleep_mode enable_trace_replay enforce_eager
        generation_config hf_config hf_config_path hf_overrides hf_text_config hf_token
        io_processor_plugin logits_processors logprobs_mode max_logprobs max_model_len model
        override_generation_config pooler_config renderer_num_workers return_sampling_mask revision
        seed served_model_name skip_tokenizer_init sleep_mode_backend sleep_mode_offload_cudagraph
        sleep_preserve_parameter_names spec_target_max_model_len tokenizer tokenizer_mode
        tokenizer_revision trust_remote_code use_fp64_gumbel
    """,
    "MultiModalConfig": """
        allow_missing_mm_embeddings enable_mm_embeds interleave_mm_strings limit_per_prompt
        mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_tp_mode
        mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type
        mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling
    """,
    "CacheConfig": """
        cpu_kvcache_space_bytes enable_prefix_caching gpu_memory_utilization kv_cache_memory_bytes
        kv_offloading_backend kv_offloading_size num_gpu_blocks_override
        prefix_cache_retention_interval prefix_match_unit
    """,
    "ParallelConfig": """
        assigned_physical_gpu_ids cpu_distributed_timeout_seconds data_parallel_backend
        data_parallel_external_lb data_parallel_hybrid_lb data_parallel_master_ip
        data_parallel_master_port data_parallel_rank data_parallel_rank_local data_parallel_rpc_port
        data_parallel_size data_parallel_size_local dbo_decode_token_threshold
        dbo_prefill_token_threshold disable_custom_all_reduce disable_nccl_for_dp_synchronization
        distributed_executor_backend distributed_timeout_seconds dp_sync_interval
        elastic_ep_max_dp_size enable_batch_sharded_sampling enable_dbo enable_elastic_ep
        enable_eplb enable_fault_tolerance enable_shm_tensor_arena eplb_config
        fault_tolerance_config is_moe_model master_addr master_port max_parallel_loading_workers
        nnodes node_rank numa_bind numa_bind_cpus numa_bind_nodes pipeline_parallel_size
        placement_group rank ray_runtime_env ray_workers_use_nsight tensor_parallel_size ubatch_size
    """,
    "LoadConfig": """
        device download_dir load_format pt_load_map_location safetensors_load_strategy
        safetensors_prefetch_block_size safetensors_prefetch_num_threads use_tqdm_on_load
    """,
    "LoRAConfig": """
        fully_sharded_loras lora_dtype max_cpu_loras max_lora_cls_labels max_lora_rank max_loras
        specialize_active_lora target_modules
    """,
    "SpeculativeConfig": """
        disable_eagle_block_drop disable_lookahead_block_hashes disable_padded_drafter_batch
        draft_load_config draft_model_config draft_parallel_config draft_sample_method
        draft_tensor_parallel_size enable_adaptive_verification enforce_eager fly_entropy_threshold
        fly_entropy_top_k fly_window_size max_model_len model num_speculative_tokens
        num_speculative_tokens_per_batch_size prompt_lookup_max prompt_lookup_min
        rejection_sample_method revision suffix_decoding_max_cached_requests
        suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth
        suffix_decoding_min_token_prob synthetic_acceptance_length synthetic_acceptance_rate
        synthetic_acceptance_rates target_model_config target_parallel_config tensor_parallel_size
        use_local_argmax_reduction xpress_topc
    """,
    "AttentionConfig": """
        flash_attn_max_num_splits_for_cuda_graph indexer_tp_shard_min_rows
        sparse_mla_prefill_workspace_factor tokenspeed_mla_min_split_kv
        tq_max_kv_splits_for_cuda_graph
    """,
    "HiSparseConfig": "device_buffer_size eager_host_mirror",
    "KernelConfig": """
        enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup
        enable_rocm_segmented_attn_autotune
    """,
    "CompilationConfig": """
        cache_dir compile_cache_save_format compile_ranges_endpoints compile_sizes
        cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_decoder_replay cudagraph_mm_encoder
        cudagraph_mode cudagraph_num_of_warmups cudagraph_specialize_lora custom_ops debug_dump_path
        decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold dynamic_shapes_config
        encoder_cudagraph_max_frames_per_batch encoder_cudagraph_max_images_per_batch
        encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_token_budgets
        fast_moe_cold_start inductor_compile_config ir_enable_torch_wrap max_cudagraph_capture_size
        pass_config splitting_ops use_inductor_graph_partition
    """,
    "ECTransferConfig": """
        ec_buffer_device ec_buffer_size ec_connector_extra_config ec_ip ec_parallel_size ec_port
        ec_rank ec_role engine_id
    """,
}
"""Harmless fields of vLLM's configurations, by their class."""

_HARMLESS_VARIABLE_NAMES = """
    CMAKE_BUILD_TYPE CUDA_HOME CUDA_VISIBLE_DEVICES FORCE_COLOR LD_LIBRARY_PATH LOCAL_RANK MAX_JOBS
    MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME NO_COLOR NVCC_THREADS
    S3_ACCESS_KEY_ID S3_ENDPOINT_URL S3_SECRET_ACCESS_KEY VERBOSE
    VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_ALLOW_INSECURE_SERIALIZATION
    VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_API_KEY VLLM_ASSETS_CACHE
    VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_AUDIO_FETCH_TIMEOUT VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT
    VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_CACHE_ROOT VLLM_CHAT_TEMPLATE_FUEL
    VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_CI_USE_S3 VLLM_COMPILE_CACHE_SAVE_FORMAT
    VLLM_COMPUTE_NANS_IN_LOGITS VLLM_CONFIGURE_LOGGING VLLM_CONFIG_ROOT VLLM_CPU_CI_ENV
    VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND
    VLLM_CUDART_SO_PATH VLLM_CUDA_COMPATIBILITY_PATH VLLM_CUSTOM_SCOPES_FOR_PROFILING
    VLLM_DEBUG_DUMP_PATH VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DEBUG_MFU_METRICS
    VLLM_DEBUG_WORKSPACE VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_DEEP_GEMM_WARMUP VLLM_DISABLE_COMPILE_CACHE
    VLLM_DISABLE_LOG_LOGO VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_DOCKER_BUILD_CONTEXT
    VLLM_DO_NOT_TRACK VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL
    VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT VLLM_ELASTIC_EP_DRAIN_REQUESTS
    VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ENABLE_COHERE_API VLLM_ENABLE_CUDAGRAPH_GC
    VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_STARTUP_PLAN
    VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_ENGINE_ITERATION_TIMEOUT_S
    VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_FASTSAFETENSORS_QUEUE_SIZE
    VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_FORCE_AOT_LOAD
    VLLM_GC_DEBUG VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS
    VLLM_GPU_NIC_PCIE_MAPPING VLLM_GPU_SYNC_CHECK VLLM_HAS_FLASHINFER_CUBIN VLLM_HOST_IP
    VLLM_HTTP_MAX_REQUEST_BODY_SIZE VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_IMAGE_FETCH_TIMEOUT
    VLLM_IMAGE_TAG VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES
    VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH
    VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM VLLM_LOG_BATCHSIZE_INTERVAL
    VLLM_LOG_MODEL_INSPECTION VLLM_LOG_STATS_INTERVAL VLLM_LOOPBACK_IP VLLM_LORA_RESOLVER_CACHE_DIR
    VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_MAIN_CUDA_VERSION VLLM_MAX_AUDIO_CLIP_FILESIZE_MB
    VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_PREPROCESS_WORKERS
    VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_EMBED_DECODE_BYTES
    VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES
    VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES
    VLLM_MAX_STOP_STRINGS VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS
    VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS
    VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_MODEL_REDIRECT_PATH
    VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_CONNECTOR_TIMEOUT
    VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_LOAD_RECV_THREADS
    VLLM_MOONCAKE_STORE_TIER_LOG VLLM_MORIIO_CONNECTOR_READ_MODE VLLM_MORIIO_NUM_WORKERS
    VLLM_MORIIO_POST_BATCH_SIZE VLLM_MORIIO_QP_PER_TRANSFER VLLM_MQ_MAX_CHUNK_BYTES_MB
    VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH
    VLLM_NIC_SELECTION_VARS VLLM_NIXL_ABORT_REQUEST_TIMEOUT VLLM_NIXL_SIDE_CHANNEL_HOST
    VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_NO_USAGE_STATS VLLM_NVTX_SCOPES_FOR_PROFILING
    VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S
    VLLM_P2P_MAX_PEERS VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT
    VLLM_PATTERN_MATCH_DEBUG VLLM_PORT VLLM_PP_LAYER_PARTITION
    VLLM_PREFIX_CACHE_RETENTION_INTERVAL VLLM_PROCESS_NAME_PREFIX VLLM_RAISE_ON_LOGIT_NANS
    VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY
    VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VARS_TO_COPY
    VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_PER_WORKER_GPUS
    VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_REQUEST_BODY_LOG_LEVEL VLLM_RINGBUFFER_WARNING_INTERVAL
    VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_RPC_BASE_PATH VLLM_RPC_TIMEOUT VLLM_RUST_FRONTEND_PATH
    VLLM_SERVER_DEV_MODE VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_SKIP_P2P_CHECK
    VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX VLLM_SYSTEM_START_DATE
    VLLM_TARGET_DEVICE VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS
    VLLM_TRACE_FUNCTION VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER
    VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FASTOKENS VLLM_USE_FLASHINFER_SAMPLER
    VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE
    VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_V2_EXECUTOR_BACKEND
    VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_USE_RUST_BENCH VLLM_USE_RUST_FRONTEND VLLM_USE_SPINLOOP_EXT
    VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_V1_USE_OUTLINES_CACHE VLLM_VIDEO_FETCH_TIMEOUT
    VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA
    VLLM_WORKER_MULTIPROC_METHOD VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_WSL2_ENABLE_PIN_MEMORY
    VLLM_XGRAMMAR_CACHE_MB VLLM_XLA_CACHE_PATH VLLM_XLA_CHECK_RECOMPILATION
    VLLM_XPU_USE_SAMPLER_KERNEL
"""
_HARMLESS_VARIABLES = frozenset(_HARMLESS_VARIABLE_NAMES.split())
"""Harmless environment variables of vLLM."""


def counted_settings(config: Any, *, but: tuple[object, ...] = (None,)) -> Iterator[str]:
    """The fields of a configuration of vLLM, and of those in it, but the harmless ones and those
    with the values `but`. Fields that vLLM computes itself do not count, either."""
    harmless = _HARMLESS.get(type(config).__name__, "").split()
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name, None)
        if name in harmless or not field.init or name.startswith("_") or value in but:
            continue
        if dataclasses.is_dataclass(value):
            yield from (f"{name}.{part}" for part in counted_settings(value))
        else:
            yield f"{name}: {_text(name, value)}"


def counted_variables() -> list[str]:
    """The environment variables of vLLM that are set, but the harmless ones."""
    from vllm import envs

    names = sorted(set(envs.environment_variables) & set(os.environ) - _HARMLESS_VARIABLES)
    return [f"{name}: {_text(name, os.environ[name])}" for name in names]


def _text(name: str, value: object) -> str:
    """A text that each process gives the value. A file counts by what it contains."""
    if name.lower().endswith(("path", "file")):
        return text_of_file(value)
    if isinstance(value, dict):
        return str({str(each): _text(str(each), value[each]) for each in sorted(value, key=str)})
    if isinstance(value, list | tuple | set | frozenset):
        texts = [_text("", each) for each in value]
        return str(sorted(texts) if isinstance(value, set | frozenset) else texts)
    hash_of = getattr(value, "compute_hash", None)
    if callable(hash_of):
        return str(hash_of())
    text = str(value)
    if isinstance(value, str) or " at 0x" not in text:
        return text
    # The default text of an object or a function has an address.
    return f"{type(value).__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
