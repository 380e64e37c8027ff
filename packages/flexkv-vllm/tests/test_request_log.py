# SPDX-License-Identifier: Apache-2.0
"""`flexkv plan` reads what vLLM's own logger writes of requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.logger import _DATE_FORMAT, _FORMAT

from flexkv.plan.read import read_trace

try:
    from vllm.entrypoints.serve.utils import request_logger
except ImportError:  # vLLM up to 0.27
    from vllm.entrypoints import logger as request_logger

A, B = list(range(100, 116)), list(range(200, 216))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """What vLLM logs at level DEBUG."""
    path = tmp_path / "vllm.log"
    handler = logging.FileHandler(path)
    # vLLM's own fields, which its own handlers add.
    added = {"fileinfo": "logger.py", "vllm_process_name": "APIServer"}
    handler.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT, defaults=added))
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield path
    logger.setLevel(level)
    logger.removeHandler(handler)
    handler.close()


def test_requests_and_answers_are_read(log: Path) -> None:
    logger = request_logger.RequestLogger(max_log_len=None)
    params = SamplingParams()
    sly = "prompt_token_ids: [7, 7], prompt_embeds shape: None."
    logger.log_inputs("cmpl-1", sly, [*A, *B, 5], None, params, None)
    logger.log_inputs("cmpl-2", "an [odd] prompt\n", [*A, 6], None, params, None)
    logger.log_outputs("cmpl-1", "output_token_ids: [9]", B[1:], "stop")
    logger.log_outputs("cmpl-2", "a", [1, 2], None, True, True)
    logger.log_outputs("cmpl-2", "b", [3], None, True, True)
    logger.log_outputs("cmpl-2", "ab", [1, 2, 3], "stop", True, False)
    logger.log_inputs("cmpl-3", sly, None, None, params, None)
    trace = read_trace(str(log)).trace
    assert (trace.form, sum(trace.skipped.values()), trace.distinct_blocks) == ("vllm", 1, 2)
    first, second = trace.requests
    assert (first.blocks, first.prompt_tokens, first.output_tokens) == ([0, 1], 33, 15)
    assert (second.blocks, second.prompt_tokens, second.output_tokens) == ([0], 17, 3)
