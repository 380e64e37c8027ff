# SPDX-License-Identifier: Apache-2.0
"""Reads vLLM's description of a step."""

from __future__ import annotations

from vllm.v1.core.sched.output import SchedulerOutput

from flexkv.engine.scheduler.scheduled_step import Placed, ScheduledStep

_NAMES_OF_NO_BLOCKS = """
    num_scheduled_tokens total_num_scheduled_tokens scheduled_spec_decode_tokens
    scheduled_encoder_inputs scheduled_encoder_input_stats num_common_prefix_blocks finished_req_ids
    free_encoder_mm_hashes preempted_req_ids has_structured_output_requests
    pending_structured_output_tokens num_invalid_spec_tokens kv_connector_metadata
    has_sync_kv_loads aux_output_connector_metadata ec_connector_metadata ec_manager_metadata
    kv_connector_block_state num_spec_tokens_to_schedule
"""
_NAME_NO_BLOCKS = frozenset(_NAMES_OF_NO_BLOCKS.split())
"""Fields of `SchedulerOutput` that make workers use no further blocks."""

_NAME_BLOCKS = {
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "new_block_ids_to_zero",
    "kv_cache_block_copies",
}
"""Those that make them use the blocks that they name."""


def lists_used_blocks() -> bool:
    """Whether all is known by which vLLM makes its workers use a block in a step."""
    return set(SchedulerOutput.__dataclass_fields__) <= _NAME_NO_BLOCKS | _NAME_BLOCKS


def read_step(output: SchedulerOutput) -> ScheduledStep:
    """Describe a step of vLLM's for FlexKV."""
    placed: list[Placed] = []
    if output.scheduled_new_reqs:
        placed += [
            Placed(new.req_id, new.block_ids, new.num_computed_tokens)
            for new in output.scheduled_new_reqs
        ]
    cached = output.scheduled_cached_reqs
    ids, given, resumed = cached.req_ids, cached.new_block_ids, cached.resumed_req_ids
    if resumed:
        placed += [
            Placed(request_id, blocks, tokens)
            for request_id, blocks, tokens in zip(
                ids, given, cached.num_computed_tokens, strict=True
            )
            if request_id in resumed and blocks
        ]
    drafts = output.scheduled_spec_decode_tokens
    # vLLM may zero blocks, and copy some to others (from 0.31 on), before workers get the step's
    # fences. Copies also go to blocks that no request has: vLLM keeps a state in its prefix cache
    # that way.
    touched = overwritten = getattr(output, "new_block_ids_to_zero", None) or ()
    if copies := getattr(output, "kv_cache_block_copies", None):
        touched = [*touched, *(block for copy in copies for block in copy)]
        overwritten = [*overwritten, *(target for _, target in copies)]
    states = getattr(output, "kv_connector_block_state", None)
    return ScheduledStep(
        output.num_scheduled_tokens,
        output.total_num_scheduled_tokens,
        sum(map(len, drafts.values())) if drafts else 0,
        placed,
        ids,
        given,
        resumed,
        output.preempted_req_ids or (),
        output.finished_req_ids,
        touched,
        overwritten,
        {} if states is None else states.boundary_state_offloads,
    )
