# SPDX-License-Identifier: Apache-2.0
"""Servers of SGLang of many kinds, one after the other, with FlexKV and without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integration.harness.checkpoint import ModelSpec
from integration.sglang.linker import PAGE_TOKENS, linker_config
from integration.sglang.plain_server import PlainServer
from integration.sglang.server import Answer, ServerConfig, SglangServer
from integration.tests.sglang_linked import Prompt, settle

ANSWER = 20


@dataclass(frozen=True, slots=True)
class Kind:
    """A server, and the further fields of its requests. Its ranks share a page."""

    page: int = PAGE_TOKENS
    ranks: int = 1
    flags: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Any]:
        """Of the configurations of both servers."""
        return {
            "page_size": self.page,
            "tensor_parallel_size": self.ranks,
            "forked": not self.env,  # SGLang reads it when it is imported
            "flags": self.flags,
        }

    def pages_of(self, prompt: Prompt) -> int:
        """Tokens of the whole pages of a prompt, of which SGLang computes the last token."""
        return (len(prompt) - 1) // self.page * self.page


class Servers:
    """Servers of one model with so many GB of host memory. Their logs are in `folder`."""

    def __init__(self, folder: Path, model: Path, spec: ModelSpec, memory_gb: str) -> None:
        self._folder, self._model, self._spec, self._memory_gb = folder, model, spec, memory_gb
        self._started: list[SglangServer] = []

    def start(self, kind: Kind, *, disk: bool = False) -> SglangServer:
        """Start a server with FlexKV; `close` ends it."""
        settings = {
            "FLEXKV_RUNTIME_DIR": str(self._folder / "run"),
            "FLEXKV_ALWAYS_LOAD": "1",
            "FLEXKV_CPU_CACHE_GB": self._memory_gb,
        }
        if disk:
            settings["FLEXKV_SSD_CACHE_GB"] = self._memory_gb
            settings["FLEXKV_SSD_CACHE_DIR"] = str(self._folder / "disk")
        config = linker_config(self._model, self._spec, settings | kind.env, **kind.fields)
        log = self._folder / f"{len(self._started)}.log"
        self._started.append(SglangServer(config, log))
        return self._started[-1]

    def plain(self, kind: Kind) -> PlainServer:
        """A server without FlexKV."""
        config = ServerConfig(self._model, self._spec, env=kind.env, **kind.fields)
        return PlainServer(config, self._folder / "plain.log")

    def second_turns(
        self, kind: Kind, prompts: list[Prompt], said: Prompt, *, flush: bool = False
    ) -> list[tuple[Answer, Answer]]:
        """The answers to second turns of a server that has the first ones on disk, and of one
        without FlexKV, whose cache is flushed between the turns or not."""
        with self.plain(kind) as plain:
            answers = [plain.generate(prompt, ANSWER) for prompt in prompts]
            turns = [[*p, *a.tokens, *said] for p, a in zip(prompts, answers, strict=True)]
            if flush:
                plain.flush()
            own = [plain.generate(turn, ANSWER) for turn in turns]
        server = self.start(kind, disk=True)
        first = [server.generate(prompt, ANSWER).tokens for prompt in prompts]
        assert first == [each.tokens for each in answers]
        settle(server)
        server.close()
        server = self.start(kind, disk=True)
        found = [server.generate(turn, ANSWER) for turn in turns]
        assert [each.tokens for each in found] == [each.tokens for each in own]
        return list(zip(found, own, strict=True))

    def close(self) -> None:
        for each in self._started:
            each.close()
