# SPDX-License-Identifier: Apache-2.0
"""Start of what follows requests under vLLM's offloading connector, and of what operators ask."""

from __future__ import annotations

from flexkv import CacheConfig
from flexkv.client import CacheClient
from flexkv.engine.boundary import ErrorBoundary
from flexkv.engine.choice.chooser import LoadChooser
from flexkv.engine.recorder import Recorder
from flexkv.engine.scheduler.operator_calls import OperatorCalls
from flexkv.engine.scheduler.reports import HitReports
from flexkv.engine.side_figures import CacheFigures
from flexkv.operators.engine_door import OperatorAccess, PromptKeys, local_http
from flexkv_vllm.offloading.prompts import OffloadedPrompts
from flexkv_vllm.offloading.requests import RequestMaker


def make_prompts(
    settings: CacheConfig,
    cache: CacheClient,
    boundary: ErrorBoundary,
    chooser: LoadChooser,
    recorder: Recorder | None,
    *,
    tokens: int,
    fingerprint: str,
) -> OffloadedPrompts:
    """Make it. Operators get answers once vLLM has shown how it hashes blocks.

    Args:
        settings: FlexKV's settings.
        cache: the cache of the engine.
        boundary: ends, counts and logs run-time errors.
        chooser: decides which hits are loaded.
        recorder: of the requests; None if nothing is recorded. Owned.
        tokens: tokens of a block.
        fingerprint: of the blocks.

    Raises:
        ConfigError: the settings of `control_port` are wrong.
    """
    http = local_http(settings)
    maker = RequestMaker(cache, settings.request_options, chooser.fetched)
    figures = CacheFigures(cache, boundary, maker.put_counts, lambda: chooser.prefill_cost)
    reports = HitReports(cache, chooser, figures, recorder, tokens)
    prompts = OffloadedPrompts(cache, maker, chooser, reports, boundary)

    def open_door(keys: PromptKeys) -> None:
        calls = OperatorCalls(
            cache,
            boundary,
            prompts.may_change,
            prompts.before_match,
            reports.sessions,
            empty=prompts.empty,
        )
        access = OperatorAccess(keys, http)
        figures.answer(calls.open(access, settings.session_root, "vllm", fingerprint))

    prompts.open_door = open_door
    return prompts
