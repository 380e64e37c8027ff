# SPDX-License-Identifier: Apache-2.0
"""Dynamo's index of KV blocks, without its workers: follows the events of one engine.

Run by the Python of `nox -s clients`. Arguments: the engine's ZeroMQ address of events, and the
tokens of its blocks. Each line of the input is a list of token ids. The answer is a line with what
Dynamo's router says the engine has of this prompt.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# Read as the modules are imported: no server for discovery, requests or events.
os.environ |= {
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_FILE_KV": tempfile.mkdtemp(),
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
}

from dynamo.llm import (
    KvEventPublisher,
    KvRouter,
    KvRouterConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime

PAUSE_SECONDS = 0.2

# Dynamo reads a model's configuration and tokenizer. No prompt is a text here.
MODEL = {
    "config.json": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 2,
        "max_position_embeddings": 8192,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "tokenizer_config.json": {"chat_template": "{{ messages[0]['content'] }}"},
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
    },
}


async def generate_nothing(_: object) -> Any:
    yield {}


def write_model(folder: Path) -> str:
    for name, content in MODEL.items():
        (folder / name).write_text(json.dumps(content))
    return str(folder)


async def _follow(events: str, block_size: int) -> tuple[KvRouter, object]:
    """The router of one worker, whose events it follows, and what must live as long."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("dynamo.backend.generate")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(generate_nothing))
    about = ModelRuntimeConfig()
    about.enable_local_indexer = True
    about.kv_event_publishing_enabled = True
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat,
        endpoint,
        write_model(Path(tempfile.mkdtemp())),
        "model",
        kv_cache_block_size=block_size,
        runtime_config=about,
        worker_type=WorkerType.Aggregated,
    )
    publisher = KvEventPublisher(
        endpoint,
        kv_block_size=block_size,
        zmq_endpoint=events,
        zmq_topic="",
        enable_local_indexer=True,
    )
    router = KvRouter(endpoint, block_size, KvRouterConfig())
    while not (await router.get_overlap_scores([1] * block_size))["workers"]:
        await asyncio.sleep(PAUSE_SECONDS)
    return router, (runtime, serving, publisher)


async def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    router, _alive = await _follow(sys.argv[1], int(sys.argv[2]))
    print(json.dumps("ready"), file=answers, flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        found = await router.get_overlap_scores(json.loads(line))
        (worker,) = found["workers"]
        print(json.dumps(worker), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
