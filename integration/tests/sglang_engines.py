# SPDX-License-Identifier: Apache-2.0
"""Servers of SGLang with two engines each, one after the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from integration.campaign.counts import Counts
from integration.sglang.server import Answer, ServerConfig, SglangServer
from integration.tests.sglang_linked import Prompt, settle, tokens

ENGINES = 2
ANSWER = 16


def prompts_of(name: str) -> list[Prompt]:
    return [tokens(f"{name} {number}", length) for number, length in enumerate((200, 333, 900))]


class EngineServers:
    """Servers of one configuration, one at a time.

    Args:
        folder: of their logs.
        config: of all servers.
        prompts: that they are asked.
        plain: the answers to these prompts without FlexKV.
    """

    def __init__(
        self, folder: Path, config: ServerConfig, prompts: list[Prompt], plain: list[list[int]]
    ) -> None:
        self._folder, self._config = folder, config
        self._prompts, self._plain = prompts, plain
        self._starts = 0
        self.start()

    def start(self) -> None:
        self.server = self.another()

    def another(self) -> SglangServer:
        """Start a server; the caller ends it."""
        self._starts += 1
        return SglangServer(self._config, self._folder / f"{self._starts}.log")

    def restart(self) -> None:
        """Kill the server and start another one."""
        settle(self.server)
        self.server.kill()
        self.start()

    def ask(self, engine: int, number: int, server: SglangServer | None = None) -> int:
        """Check the answer to a prompt. Returns how much of the prompt was cached."""
        answer = self._ask(server or self.server, engine, self._prompts[number])
        assert (answer.tokens, answer.meta["dp_rank"]) == (self._plain[number], engine)
        return answer.cached_tokens

    def ask_all(self, engine: int) -> list[int]:
        return [self.ask(engine, number) for number in range(len(self._prompts))]

    def ask_at_once(self) -> list[list[int]]:
        """Ask both engines at the same time."""
        with ThreadPoolExecutor(ENGINES) as pool:
            return list(pool.map(self.ask_all, range(ENGINES)))

    def forget(self) -> None:
        """No engine has anything of a prompt in SGLang's own pages."""
        settle(self.server)
        self.server.flush()
        for engine in range(ENGINES):
            for part in range(3):
                self._ask(self.server, engine, tokens(f"overwrite {part}", 1900))
                settle(self.server)
        self.server.flush()

    def counts(self) -> Counts:
        return Counts(self.server.metrics(), "sglang:")

    @staticmethod
    def _ask(server: SglangServer, engine: int, prompt: Prompt) -> Answer:
        return server.generate_all([prompt], ANSWER, routed_dp_rank=engine)[0]
