# SPDX-License-Identifier: Apache-2.0
"""One rank of vLLM as torchrun starts it; its argument is JSON of vLLM's ``LLM``."""

from __future__ import annotations

import json
import sys

STARTED = "this rank has started"

if __name__ == "__main__":
    from vllm import LLM

    LLM(**json.loads(sys.argv[1]))
    print(STARTED, flush=True)
