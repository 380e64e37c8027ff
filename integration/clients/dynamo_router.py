# SPDX-License-Identifier: Apache-2.0
"""Dynamo's KV router over workers that only emit events: it says where it would send a prompt.

Run by the Python of `nox -s clients`. Arguments: the topic of events, the tokens of a block, the
weight of hits in host memory, that of hits on disk, and each worker's ZeroMQ address of events.
Each line of the input is one of these, and each has an answer:

    {"route": [token ids], "id": a name}    the worker's number, and its hit as the router counts it
    {"computed": a name}                    null: the prompt of this request is computed
    {"ended": a name}                       null
    {"known": [token ids]}                  blocks in device, host memory and disk, by worker
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
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


async def _start(
    topic: str, block_size: int, weights: tuple[float, float], events: Sequence[str]
) -> tuple[KvRouter, object]:
    """The router, and what must live as long. The workers are ranks of one endpoint."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("dynamo.backend.generate")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(generate_nothing))
    about = ModelRuntimeConfig()
    about.enable_local_indexer = True
    about.kv_event_publishing_enabled = True
    about.data_parallel_size = len(events)
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
    publishers = [
        KvEventPublisher(
            endpoint,
            kv_block_size=block_size,
            dp_rank=rank,
            zmq_endpoint=address,
            zmq_topic=topic,
            enable_local_indexer=True,
        )
        for rank, address in enumerate(events)
    ]
    host, disk = weights
    config = KvRouterConfig(host_cache_hit_weight=host, disk_cache_hit_weight=disk)
    router = KvRouter(endpoint, block_size, config)
    while not (await router.get_overlap_scores([1] * block_size))["workers"]:
        await asyncio.sleep(PAUSE_SECONDS)
    return router, (runtime, serving, publishers)


async def _answer(router: KvRouter, asked: dict[str, Any]) -> Any:
    if "route" in asked:
        _, rank, overlap = await router.best_worker(asked["route"], request_id=asked["id"])
        return [rank, overlap]
    if "known" in asked:
        workers = (await router.get_overlap_scores(asked["known"]))["workers"]
        names = ("device_blocks", "host_pinned_blocks", "disk_blocks")
        return {each["dp_rank"]: [each[name] for name in names] for each in workers}
    if "computed" in asked:
        await router.mark_prefill_complete(asked["computed"])
    else:
        await router.free(asked["ended"])
    return None


async def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    topic, size, host, disk, *events = sys.argv[1:]
    router, _alive = await _start(topic, int(size), (float(host), float(disk)), events)
    print(json.dumps("ready"), file=answers, flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        answer = await _answer(router, json.loads(line))
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
