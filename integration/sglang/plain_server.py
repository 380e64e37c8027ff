# SPDX-License-Identifier: Apache-2.0
"""SGLang without FlexKV, for its answers only: most are stored; see ``harness.golden``."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from integration.harness.golden import Ledger, StandIn, portable, without_cores
from integration.sglang import environment
from integration.sglang.server import ServerConfig, SglangClient, SglangServer

_VERSION = "import importlib.metadata; print(importlib.metadata.version('sglang'))"
_GENERATE, _FLUSH = "/generate", "/flush_cache"
_LASTING = {"/load_lora_adapter", "/unload_lora_adapter", "/open_session", "/close_session"}
"""Paths whose effect outlives a flush."""

_META = ("cached_tokens", "prompt_tokens", "input_token_logprobs")
_FIELDS = ("output_ids", "text")


class PlainServer(SglangClient, StandIn):
    """Answers as a server of this configuration does; starts one where an answer is not stored.

    A context manager that ends the server. Each call ends before the next one begins.

    Args:
        config: of the server, which must not enable FlexKV.
        log_path: receives all that its processes print.
        ledger: of the process, unless a test has another one.
    """

    def __init__(self, config: ServerConfig, log_path: Path, ledger: Ledger | None = None) -> None:
        if config.flags.get("enable_flexkv"):
            raise ValueError("a plain server with enable_flexkv")
        self.config, self._log_path = config, log_path
        self._server: SglangServer | None = None
        StandIn.__init__(
            self,
            f"sglang-{sglang_version()}",
            _identity(config) if config.arguments()["dtype"] == "float32" else None,
            ledger=ledger,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """The part of the answer that is stored.

        Raises:
            ValueError: answers to this request are not stored.
        """
        if path == _FLUSH:
            self.forget(lambda: self._started().flush())
            return ""
        if path != _GENERATE and path not in _LASTING:
            raise ValueError(f"no answer to {path} is stored: use SglangServer")
        answer = self.call(
            {"path": path, "body": portable(body)},
            lambda: _kept(self._started().ask(path, body, method, headers)),
            lasting=path in _LASTING,
        )
        return json.dumps(answer)

    def close(self) -> None:
        """End the server, if there is one. Idempotent."""
        if self._server is not None:
            self._server.close()

    def _started(self) -> SglangServer:
        if self._server is None:
            self._server = SglangServer(self.config, self._log_path)
        return self._server


def _kept(text: str) -> Any:
    """What tests need of an answer."""
    answer = json.loads(text) if text.startswith(("{", "[", '"')) else ""
    if isinstance(answer, list):
        return [_of_one(each) for each in answer]
    if isinstance(answer, dict) and "meta_info" in answer:
        return _of_one(answer)
    if isinstance(answer, dict):
        return {"success": answer.get("success")}
    return answer


def _of_one(answer: Mapping[str, Any]) -> dict[str, Any]:
    meta = answer["meta_info"]
    finish = {"type": (meta["finish_reason"] or {}).get("type")}
    kept_meta = {name: meta[name] for name in _META if name in meta} | {"finish_reason": finish}
    return {name: answer[name] for name in _FIELDS if answer.get(name)} | {"meta_info": kept_meta}


def _identity(config: ServerConfig) -> dict[str, Any]:
    """All that answers depend on beside the calls."""
    variables = config.environment()
    return {
        "version": sglang_version(),
        "arguments": portable(config.arguments()),
        "environment": portable({**environment.FOR_ENGINES, **config.env}),
        "threads": without_cores(variables.get(environment.CORES, "")),
    }


@functools.cache
def sglang_version() -> str:
    """Version of the SGLang that the tests start.

    Raises:
        EnvironmentMissingError: there is no Python with SGLang.
    """
    command = [str(environment.python()), "-c", _VERSION]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return found.stdout.strip().split("+")[0]
