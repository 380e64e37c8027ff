# SPDX-License-Identifier: Apache-2.0
"""vLLM's own HTTP server in processes of its own, for what only it shows: `/metrics`, KV events on
a socket, parameters in a request's JSON. It takes and gives tokens, so that it needs no tokenizer.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integration.harness.answers import CALL_TIMEOUT, EngineError
from integration.harness.config import EngineConfig
from integration.harness.http_server import HttpServer, Start, spawned
from integration.harness.vllm_forks import fork_server

_MODULE = "vllm.entrypoints.openai.api_server"


class Server(HttpServer):
    """A server of one engine; a context manager that ends it.

    Args:
        config: of the engine.
        log_path: receives all that its processes print.
        events: ZeroMQ endpoint that it publishes KV events on; None: it does not.

    Raises:
        EngineError: it did not start; nothing of it is left then.
    """

    def __init__(self, config: EngineConfig, log_path: Path, events: str | None) -> None:
        arguments = config.engine_args() | {"tokens_only": True}
        if events is not None:
            arguments["kv_events_config"] = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": events,
            }
        if config.forked:
            start: Start = functools.partial(fork_server().run, _MODULE)
        else:
            start = spawned([sys.executable, "-m", _MODULE])
        super().__init__(
            "vLLM",
            start,
            arguments,
            config.environment() | {"VLLM_SERVER_DEV_MODE": "1"},
            log_path,
        )

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        params: dict[str, Any] | None = None,
        engine: int | None = None,
    ) -> list[int]:
        """The tokens that follow `prompt`; `params` are its `kv_transfer_params`, and `engine` is
        the data-parallel rank that computes them."""
        tokens: list[int] = self.choice(prompt, max_tokens, params, engine=engine)["token_ids"]
        return tokens

    def choice(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        params: dict[str, Any] | None = None,
        logprobs: int | None = None,
        engine: int | None = None,
    ) -> dict[str, Any]:
        """As `generate`, but all that the server says: with `logprobs`, as many for each token."""
        body = {
            "token_ids": list(prompt),
            "sampling_params": {
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": logprobs,
            },
            "kv_transfer_params": params,
        }
        headers = None if engine is None else {"X-data-parallel-rank": str(engine)}
        answer = self.ask("/inference/v1/generate", body, headers=headers)
        choice: dict[str, Any] = json.loads(answer)["choices"][0]
        return choice

    def reset_prefix_cache(self, external: bool) -> None:
        """Empty vLLM's own cache, once none of its blocks is in use, and then FlexKV's if
        `external`. EngineError if they stay in use."""
        deadline = time.monotonic() + CALL_TIMEOUT
        while not self.try_reset(external=False):
            if time.monotonic() > deadline:
                raise EngineError("the prefix cache could not be reset: blocks are in use")
            time.sleep(0.05)
        if external:
            self.try_reset(external=True)

    def try_reset(self, external: bool) -> bool:
        """Empty vLLM's own cache, which needs none of its blocks to be in use, and FlexKV's if
        `external`, in any case. Returns whether both are done."""
        answer = self.ask(f"/reset_prefix_cache?reset_external={str(external).lower()}", {})
        return bool(json.loads(answer)["success"])
