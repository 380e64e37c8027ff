# SPDX-License-Identifier: Apache-2.0
"""What the fork server of SGLang has imported, and what it needs to fork all of SGLang's processes.

The fork server only imports, so that a process forked from it is as one that a user starts. A
process that SGLang forks then has the plugins that its parent has loaded.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from typing import Any

from integration.harness.fork_server import ForkedProcess, ForkServer
from integration.sglang import environment

_PREFIX = "SGLANG_"
_READ_LATER = {environment.CORES}
_WATCH_SECONDS = 0.1
_IMPORTED_LATE = ("sglang.launch_server", "sglang.srt.models.registry", "sglang.srt.models.llama")


@functools.cache
def fork_server() -> ForkServer:
    """The server of this process, started when it is first needed.

    Raises:
        EnvironmentMissingError: there is no Python with SGLang.
    """
    env = os.environ | environment.FOR_ENGINES | {"PYTHONPATH": environment.python_path()}
    return ForkServer(environment.python(), __name__, env)


def start(env: Mapping[str, str], log: int, arguments: Sequence[str]) -> ForkedProcess:
    """Fork SGLang's HTTP server; see `http_server.Start`.

    Raises:
        ValueError: SGLang would ignore a variable of ``env``.
        RuntimeError: the fork server has ended.
    """
    server = fork_server()
    check_environment(env, server.environment)
    return server.run("sglang.launch_server", env, log, arguments)


def check_environment(env: Mapping[str, str], imported_with: Mapping[str, str]) -> None:
    """Raises ValueError if a process of the environment ``env`` would ignore one of SGLang's
    variables, because SGLang was imported with another value."""
    for name in sorted({*env, *imported_with}):
        wanted, read = env.get(name), imported_with.get(name)
        if name.startswith(_PREFIX) and name not in _READ_LATER and wanted != read:
            raise ValueError(
                f"{name}={wanted} in a server's environment: the fork server has imported SGLang "
                f"with {name}={read}, and SGLang reads it only then; start it with forked=False"
            )


def prepare() -> None:
    """Import SGLang, and have it fork its processes; within the server."""
    engine: Any = importlib.import_module("sglang.srt.entrypoints.engine")
    configure = engine._set_envs_and_config

    def and_fork(server_args: object) -> None:
        configure(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = and_fork
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    manager: Any = importlib.import_module("sglang.srt.managers.tokenizer_manager")
    _end_soon(manager.TokenizerManager)


def _end_soon(manager: Any) -> None:
    """Have a server notice SIGTERM at once; SGLang itself looks every 5 s."""
    end = manager.sigterm_watchdog

    async def watch(self: Any) -> None:
        while not self.gracefully_exit:
            await asyncio.sleep(_WATCH_SECONDS)
        await end(self)

    manager.sigterm_watchdog = watch
