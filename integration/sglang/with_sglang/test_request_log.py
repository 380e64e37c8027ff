# SPDX-License-Identifier: Apache-2.0
"""`flexkv plan` reads what SGLang's own logger writes of requests."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.request_logger import RequestLogger

from flexkv.plan.read import read_trace

A, B = list(range(100, 116)), list(range(200, 216))
LONG = list(range(4000))


def finished(ids: list[int]) -> dict[str, Any]:
    return {"text": "'output_ids': [9]", "output_ids": ids, "meta_info": {"e2e_latency": 1.0}}


@pytest.mark.parametrize(("form", "level"), [("text", 3), ("json", 3), ("text", 2), ("json", 2)])
def test_requests_and_answers_are_read(tmp_path: Path, form: str, level: int) -> None:
    path = tmp_path / "sglang.log"
    handler = logging.FileHandler(path)
    text = "[%(asctime)s] %(message)s" if form == "text" else "%(message)s"
    handler.setFormatter(logging.Formatter(text, "%Y-%m-%d %H:%M:%S"))
    logger = RequestLogger(True, level, form, None)
    for target in logger.targets:
        target.addHandler(handler)
        target.setLevel(logging.INFO)
    try:
        one = GenerateReqInput(rid="one", text="input_ids=[7, 7]", input_ids=[*A, *B, 5])
        two = GenerateReqInput(rid="two", input_ids=[*A, 6])
        long = GenerateReqInput(rid="long", input_ids=LONG)
        for each in (one, two, long, GenerateReqInput(rid="text", text="hello")):
            logger.log_received_request(each)
        logger.log_finished_request(one, finished(B[1:]))
        logger.log_finished_request(two, finished([1, 2, 3]))
    finally:
        for target in logger.targets:
            target.removeHandler(handler)
        handler.close()
    trace = read_trace(str(path)).trace
    assert trace.form == "sglang"
    shapes = [(each.prompt_tokens, each.output_tokens) for each in trace.requests]
    # At level 2 SGLang shortens prompts of more than 2,048 tokens.
    assert shapes == [(33, 15), (17, 3), (4000, 0)][:level]
    assert sum(trace.skipped.values()) == 4 - level
    assert trace.requests[1].blocks == trace.requests[0].blocks[:1]
