# SPDX-License-Identifier: Apache-2.0
"""An engine's own HTTP server in processes of its own: start, requests, end."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from integration.harness import processes, starts
from integration.harness.answers import CALL_TIMEOUT, EngineError
from integration.harness.engine import START_TIMEOUT, STOP_TIMEOUT
from integration.harness.fork_server import KEEP_BYTECODE
from integration.harness.ports import hold_port


class Process(Protocol):
    """What a server needs of `subprocess.Popen`, whoever started the process."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def wait(self) -> int: ...


Start = Callable[[Mapping[str, str], int, Sequence[str]], Process]
"""Starts a server in a process group of its own, with an environment, a descriptor that receives
what it prints and the arguments of its command line."""


def spawned(command: Sequence[str]) -> Start:
    """Starts ``command`` as a user's shell does."""

    def start(env: Mapping[str, str], log: int, arguments: Sequence[str]) -> Process:
        return subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
            env=env,
        )

    return start


class HttpServer:
    """A server; a context manager that ends it. Methods may be called from several threads.
    `HEALTH` is what it answers when it is ready.

    Args:
        name: of the engine, for messages.
        start: starts its first process.
        arguments: of its command line but for the address, by their names in Python: True stands
            for a flag without a value, False for none, a list for several values, a dict for JSON.
        env: environment of its processes.
        log_path: receives all that its processes print.

    Attributes:
        address: host and port that it listens on.
        log_path: as given.

    Raises:
        EngineError: it did not start; nothing of it is left then.
    """

    HEALTH = "/health"

    def __init__(
        self,
        name: str,
        start: Start,
        arguments: Mapping[str, Any],
        env: Mapping[str, str],
        log_path: Path,
    ) -> None:
        self.log_path = log_path
        self._name = name
        self._held = hold_port()
        port: int = self._held.getsockname()[1]
        self.address = ("127.0.0.1", port)
        self._url = f"http://127.0.0.1:{port}"
        flags = _flags({**arguments, "host": "127.0.0.1", "port": port})
        log_path.parent.mkdir(parents=True, exist_ok=True)
        starts.note(name, with_flexkv="flexkv" in " ".join(flags).lower())
        with log_path.open("wb") as log:
            self._process = start({**env, **KEEP_BYTECODE}, log.fileno(), flags)
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def group(self) -> int:
        """Id of its process group; see `processes`."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended; a server ends when its engine does."""
        return self._process.poll() is None

    def metrics(self) -> str:
        """What Prometheus would scrape."""
        return self.ask("/metrics")

    def log(self) -> str:
        """All that it has printed so far."""
        return self.log_path.read_text(errors="replace")

    def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """The answer to an HTTP request.

        Raises:
            urllib.error.HTTPError: the server refused it.
            urllib.error.URLError, ConnectionError: the server is not there.
        """
        with self.open(path, body, method, headers) as answer:
            text: str = answer.read().decode()
            return text

    def open(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """As `ask`, but the answer is to be read, line by line if wanted, and closed."""
        data = None if body is None else json.dumps(body).encode()
        told = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self._url + path, data, told, method=method)
        return urllib.request.urlopen(request, timeout=CALL_TIMEOUT)

    def kill(self) -> None:
        """End it as `kill -9` does: no process of it can do anything more."""
        processes.kill_group(self._process.pid)
        self._process.wait()

    def close(self) -> None:
        """End it. Idempotent."""
        self._process.terminate()
        processes.wait_until_gone(self._process.pid, STOP_TIMEOUT)
        self.kill()
        self._held.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and self.alive:
            try:
                self.ask(self.HEALTH)
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
            else:
                return
        raise EngineError(f"{self._name} did not start; its log ends with:\n{self.log()[-4000:]}")


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments by their names in Python as both engines' command lines have them."""
    flags = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        elif value is not False:
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags
