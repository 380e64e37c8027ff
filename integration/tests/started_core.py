# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM's engine core with its worker in this process, and ends it. Its argument is JSON of
vLLM's ``AsyncEngineArgs``.

A forked process that runs it says and refuses what an engine does at its start.
"""

from __future__ import annotations

import json
import sys

STARTED = "this engine core has started"

if __name__ == "__main__":
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    config = AsyncEngineArgs(**json.loads(sys.argv[1])).create_engine_config()
    core = EngineCore(config, UniProcExecutor, log_stats=False)
    print(STARTED, flush=True)
    core.shutdown()
