# SPDX-License-Identifier: Apache-2.0
"""What the fork server of vLLM has imported, and what it needs to fork all of vLLM's processes."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
from pathlib import Path

from integration.harness.config import forked_environment
from integration.harness.fork_server import ForkServer

# vLLM imports these while an engine or a server starts.
_IMPORTED_LATE = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)

_SERVERS = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
"""What a server imports; vLLM up to 0.26 has the second, newer ones the first."""


@functools.cache
def fork_server() -> ForkServer:
    """The server of this process, started when it is first needed."""
    return ForkServer(Path(sys.executable), __name__, forked_environment())


def _leave_frozen() -> None:
    """In place of `gc.unfreeze`."""


def prepare() -> None:
    """Import vLLM, and have it fork its processes also on CPUs; within the server.

    Forking is vLLM's default, but its platform of CPUs sets the environment variable to "spawn"
    whenever it completes a configuration.
    """
    from vllm.platforms import current_platform

    complete = current_platform.check_and_update_config

    def and_fork(config: object) -> None:
        complete(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    type(current_platform).check_and_update_config = staticmethod(and_fork)
    # When they end, vLLM's processes unfreeze all objects and collect them, which copies the pages
    # of this server: 1.2 s of processor time an engine.
    gc.unfreeze = _leave_frozen
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    _import_server()


def _import_server() -> None:
    """Import what a server imports, under its name in this release."""
    newer, older = _SERVERS
    try:
        importlib.import_module(newer)
    except ModuleNotFoundError:
        importlib.import_module(older)
