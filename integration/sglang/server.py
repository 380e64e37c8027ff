# SPDX-License-Identifier: Apache-2.0
"""SGLang's own HTTP server in processes of its own, started from any Python. It takes and gives
tokens, so that it needs no tokenizer.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integration.harness.answers import CALL_TIMEOUT, Completion, EngineError
from integration.harness.checkpoint import ModelSpec
from integration.harness.cores import cores_of_ranks
from integration.harness.http_server import HttpServer, spawned
from integration.sglang import environment, forks

_ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "mem_fraction_static": 0.3,
}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What a server is started with.

    ``flags`` are further arguments of SGLang's command line by their names in Python: True stands
    for a flag without a value, a list for several values, a dict for JSON. ``env`` is added to the
    environment. ``kv_tokens`` is the size of SGLang's KV cache in tokens. ``forked`` forks the
    server from a process that has imported SGLang, and has SGLang fork its processes; SGLang itself
    spawns each, and each imports SGLang for 9 s.
    """

    model: Path
    spec: ModelSpec
    page_size: int = 16
    kv_tokens: int = 4096
    chunked_prefill: int = 512
    tensor_parallel_size: int = 1
    forked: bool = False
    flags: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """All arguments but the address, by their names in Python."""
        return {
            **_ON_CPU,
            "model_path": str(self.model),
            "dtype": self.spec.dtype,
            "page_size": self.page_size,
            "max_total_tokens": self.kv_tokens,
            "chunked_prefill_size": self.chunked_prefill,
            "tp_size": self.tensor_parallel_size,
            "random_seed": 0,
            **self.flags,
        }

    def environment(self) -> dict[str, str]:
        """The environment of the server's processes."""
        base = dict(environment.FOR_ENGINES)
        attention = self.flags.get("enable_dp_attention", False)
        engines = 1 if attention else self.flags.get("dp_size", 1)
        ranks = self.tensor_parallel_size * engines * self.flags.get("pp_size", 1)
        if ranks > 1:
            base[environment.CORES] = cores_of_ranks(ranks)
        return os.environ | base | dict(self.env)


@dataclass(frozen=True, slots=True)
class Answer:
    """What SGLang answered to one prompt.

    ``cached_tokens`` counts prompt tokens that were not computed, from whichever cache they came;
    ``finish`` is SGLang's reason, such as "length" or "abort"; ``meta`` is all that it says.
    """

    tokens: list[int]
    cached_tokens: int
    finish: str | None
    meta: dict[str, Any]


class SglangClient(ABC):
    """Requests to a server, or to what stands for one; `ask` sends them.

    Attributes:
        config: of the server.
    """

    config: ServerConfig

    @abstractmethod
    def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """The answer to an HTTP request; see `HttpServer`."""

    def generate(self, prompt: Sequence[int], max_tokens: int = 8, **request: Any) -> Answer:
        """The greedy answer to a prompt.

        ``request`` are further fields of the request, such as `extra_key`, `rid` or `lora_path`.
        """
        return self.generate_all([prompt], max_tokens, **_each(request))[0]

    def generate_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **request: Any
    ) -> list[Answer]:
        """The greedy answers to prompts that arrive as one batch; fields of `request` are lists."""
        sampling = {"max_new_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": list(map(list, prompts)), "sampling_params": sampling, **request}
        return [
            Answer(
                tokens=answer["output_ids"],
                cached_tokens=answer["meta_info"].get("cached_tokens", 0),
                finish=(answer["meta_info"]["finish_reason"] or {}).get("type"),
                meta=answer["meta_info"],
            )
            for answer in json.loads(self.ask("/generate", body))
        ]

    def generate_with(
        self, parameters: dict[str, Any], prompt: Sequence[int], max_tokens: int = 8
    ) -> None:
        """Answer a prompt with parameters for FlexKV."""
        sampling = {"max_new_tokens": max_tokens, "custom_params": parameters}
        self.ask("/generate", {"input_ids": list(prompt), "sampling_params": sampling})

    def abort(self, rid: str) -> None:
        """Abort a request by its `rid`."""
        self.ask("/abort_request", {"rid": rid})

    def flush(self) -> None:
        """Empty SGLang's own caches, once no request is under way. EngineError if that lasts."""
        deadline = time.monotonic() + CALL_TIMEOUT
        while not self.try_flush():
            if time.monotonic() > deadline:
                raise EngineError("SGLang's cache could not be flushed: requests are under way")
            time.sleep(0.05)

    def try_flush(self) -> bool:
        """Empty SGLang's own caches; False when requests are under way."""
        try:
            self.ask("/flush_cache", {})
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
            return False
        return True

    def await_steps(self) -> None:
        """Return once the scheduler has ended the step that it was in, and another one: what an
        answer has caused is in the metrics then."""
        for _ in range(2):  # the scheduler answers this at the start of a step
            self.ask("/server_info")

    def overwrite(
        self, seed: str = "overwrite", after_each: Callable[[], None] = lambda: None
    ) -> None:
        """Use every slot of the KV cache for other tokens, so that stale ones cannot pass for
        restored ones; then flush. `after_each` is called after each of the prompts."""
        from integration.harness.prompts import random_tokens

        size = self.config.kv_tokens // 2 - 4 * self.config.page_size
        for part in range(3):
            self.generate(random_tokens(f"{seed}/{part}", size, self.config.spec.vocab), 1)
            after_each()
        self.flush()


class SglangServer(HttpServer, SglangClient):
    """A server; a context manager that ends it. Methods may be called from several threads.

    Args:
        config: what it is started with; its metrics need the flag `enable_metrics`.
        log_path: receives all that its processes print.

    Raises:
        EngineError: it did not start; nothing of it is left then.
        EnvironmentMissingError: there is no Python with SGLang.
    """

    def __init__(self, config: ServerConfig, log_path: Path) -> None:
        self.config = config
        command = [str(environment.python()), "-m", "sglang.launch_server"]
        start = forks.start if config.forked else spawned(command)
        super().__init__("SGLang", start, config.arguments(), config.environment(), log_path)

    def stream(
        self, prompt: Sequence[int], max_tokens: int, ignore_eos: bool = True
    ) -> tuple[Completion, dict[str, Any]]:
        """The greedy answer with the time of each token, and SGLang's last word on it."""
        sampling = {"max_new_tokens": max_tokens, "temperature": 0.0, "ignore_eos": ignore_eos}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
        tokens: list[int] = []
        times: list[float] = []
        meta: dict[str, Any] = {}
        begin = time.monotonic()
        with self.open("/generate", body) as answer:
            for line in answer:
                part = line.decode().removeprefix("data: ").strip()
                if not part.startswith("{"):
                    continue
                found = json.loads(part)
                meta = found["meta_info"]
                # Each part has all tokens so far, or those that are new.
                new = found["output_ids"]
                tokens = new if len(new) == meta["completion_tokens"] else tokens + new
                times += [time.monotonic() - begin] * (len(tokens) - len(times))
        finish = (meta["finish_reason"] or {}).get("type")
        return Completion(tokens, finish, meta["cached_tokens"], times), meta


def _each(request: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: [value] for name, value in request.items()}
