# SPDX-License-Identifier: Apache-2.0
"""LMCache under a real vLLM that computes on a CPU: its server, and LMCache within the engine.

A server with the `fs` adapter is stopped, its files are damaged, and another one starts on them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from integration.harness import connector
from integration.harness.answers import CALL_TIMEOUT, Completion, EngineError
from integration.harness.checkpoint import TINY, write_checkpoint
from integration.harness.config import EngineConfig
from integration.harness.connector import Connector
from integration.harness.engine import Engine
from integration.harness.http_server import HttpServer, Process, spawned
from integration.harness.ports import hold_port
from integration.harness.prompts import random_tokens
from integration.peers.files import flip, modes
from integration.peers.page import LMCACHE, Finding

CHUNK, LENGTH, GIGABYTES = 64, 330, 0.25
PROMPTS = {name: random_tokens(name, LENGTH, TINY.vocab) for name in ("intact", "flipped", "short")}
COMMAND = [sys.executable, "-m", "lmcache.cli.main", "server"]


class LmcacheServer(HttpServer):
    """`lmcache server` with the `fs` adapter on a folder.

    Attributes:
        port: that engines connect to.
    """

    HEALTH = "/healthcheck"

    def __init__(self, files: Path, log_path: Path) -> None:
        self._socket = hold_port()
        self.port: int = self._socket.getsockname()[1]
        run = spawned(COMMAND)

        def start(env: Mapping[str, str], log: int, arguments: Sequence[str]) -> Process:
            own = {"--host": "--http-host", "--port": "--http-port"}
            return run(
                env, log, [*(own.get(each, each) for each in arguments), "--port", str(self.port)]
            )

        arguments = {
            "supported_transfer_mode": "auto",
            "chunk_size": CHUNK,
            "l1_size_gb": GIGABYTES,
            "eviction_policy": "LRU",
            "l2_adapter": {"type": "fs", "base_path": str(files)},
        }
        super().__init__("LMCache", start, arguments, {**os.environ}, log_path)

    def close(self) -> None:
        """End it. Idempotent."""
        super().close()
        self._socket.close()


def lmcache_findings(folder: Path) -> Iterator[Finding]:
    """Each row of LMCache that runs without a GPU."""
    model, files = write_checkpoint(TINY, folder), folder / "files"
    # Not forked: vLLM's worker does not start once LMCache's numba is imported.
    config = EngineConfig(model, TINY.dtype, block_size=32, kv_cache_bytes=64 << 20)

    def engine(kind: Connector, name: str) -> Engine:
        return Engine(dataclasses.replace(config, connector=kind), folder / f"{name}.log")

    with engine(connector.NONE, "plain") as plain:
        expected = {name: _ask(plain, name) for name in PROMPTS}
    mask = os.umask(0)
    with LmcacheServer(files, folder / "server.log") as server:
        os.umask(mask)
        kind = connector.lmcache_server(server.port)
        with engine(kind, "first") as first:
            stored = {name: _stored(first, name, files) for name in PROMPTS}
            first.reset_prefix_cache()
            yield _loaded("KV cache in the memory of CPUs", "server", first, expected)
        with engine(kind, "second") as second:
            row = "one cache for the engines of a node"
            yield _loaded(row, "another engine", second, expected)
    of_all = [file for some in stored.values() for file in some]
    yield Finding(LMCACHE, "mode of files on disk", modes(of_all), holds=modes(of_all) == "0666")

    for file in stored["flipped"]:
        flip(file, every=4)
    for file in stored["short"]:
        os.truncate(file, file.stat().st_size // 2)
    with (
        LmcacheServer(files, folder / "restarted.log") as server,
        engine(connector.lmcache_server(server.port), "third") as third,
    ):
        row = "blocks on disk found after a restart"
        yield _loaded(row, "restarted server", third, expected, ["intact"])
        wrong, short = _ask(third, "flipped"), _ask(third, "short")
    differ = wrong.tokens != expected["flipped"].tokens
    seen = f"flipped bytes: {wrong.cached_tokens} tokens loaded, other answer: {differ}; "
    seen += f"short files: {short.cached_tokens} tokens loaded"
    holds = differ and bool(wrong.cached_tokens) and not short.cached_tokens
    yield Finding(LMCACHE, "bytes verified when read from disk", seen, holds)
    yield _within_the_engine(engine)


def _within_the_engine(engine: Callable[[Connector, str], Engine]) -> Finding:
    """LMCache in the processes of an engine, as `LMCacheConnectorV1` has it."""
    try:
        with engine(connector.lmcache(GIGABYTES), "within") as own:
            _ask(own, "intact")
            own.reset_prefix_cache()
            loaded = _ask(own, "intact").cached_tokens or 0
            seen = f"within the engine: {loaded} of {LENGTH} tokens loaded"
            cause = re.search(r"LMCache ERROR.*?^(\w+Error: [^\n]*)", own.log(), re.S | re.M)
            seen += f"; {cause[1]}" if cause else ""
    except EngineError as error:
        loaded, seen = 0, f"within the engine: {str(error).splitlines()[0]}"
    return Finding(LMCACHE, "KV cache in the memory of CPUs", seen, holds=not loaded)


def _loaded(
    row: str,
    what: str,
    engine: Engine,
    expected: Mapping[str, Completion],
    names: Iterable[str] = PROMPTS,
) -> Finding:
    """Whether an engine that has computed nothing loads prompts, and answers as one without."""
    answers = {name: _ask(engine, name) for name in names}
    loaded = [answer.cached_tokens or 0 for answer in answers.values()]
    equal = all(answer.tokens == expected[name].tokens for name, answer in answers.items())
    seen = f"{what}: {loaded} of {LENGTH} tokens loaded, tokens equal: {equal}"
    return Finding(LMCACHE, row, seen, holds=equal and all(loaded))


def _ask(engine: Engine, name: str) -> Completion:
    return engine.generate(PROMPTS[name], max_tokens=8)


def _stored(engine: Engine, name: str, files: Path) -> set[Path]:
    """The files of a prompt that is computed now, once all are there."""
    before = set(files.glob("*.data"))
    _ask(engine, name)
    deadline = time.monotonic() + CALL_TIMEOUT
    while len(found := set(files.glob("*.data")) - before) < LENGTH // CHUNK:
        if time.monotonic() > deadline:
            raise EngineError(f"LMCache wrote {len(found)} of {LENGTH // CHUNK} files")
        time.sleep(0.05)
    return found
