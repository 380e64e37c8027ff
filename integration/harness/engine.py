# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine in processes of its own, driven from a process that imports neither.

``Engine`` starts ``driver.py`` in a process group of its own, by itself or by the fork server, so
all processes of the engine are known and end with it. Methods may be called from several threads.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from integration.harness import processes, starts
from integration.harness.answers import (
    CALL_TIMEOUT,
    Completion,
    EngineError,
    EngineStartError,
    Generation,
    await_answer,
)
from integration.harness.config import EngineConfig
from integration.harness.fork_server import ForkedProcess
from integration.harness.vllm_forks import fork_server

if TYPE_CHECKING:
    from integration.harness.adapter import Adapter

_DRIVER = "integration.harness.driver"
# A tiny model starts in seconds (forked) to 45 s on two cores of its own. These bounds are for what
# hangs, and leave room for a machine that is many times slower or stands still for a while.
START_TIMEOUT = 900.0
STOP_TIMEOUT = 180.0
# vLLM's processes catch SIGTERM and give back their shared memory.
_TERM_SECONDS = 5.0


class Engine:
    """A running engine; also a context manager that closes it.

    ``leftovers`` holds, once it has ended, what it left in /dev/shm; those files are removed then
    (vLLM itself leaves some after a kill, and always with two CPU ranks).
    ``log_path`` receives all that the engine's processes print. Raises EngineStartError when the
    engine is not ready in ``start_timeout`` seconds; no process of it is left then.
    """

    def __init__(
        self,
        config: EngineConfig,
        log_path: Path,
        *,
        start_timeout: float = START_TIMEOUT,
    ) -> None:
        self.config = config
        self.log_path = log_path
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._generations: dict[int, Generation] = {}
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._started: Future[None] = Future()
        self._closed = False
        self.leftovers: set[Path] = set()
        began = time.monotonic()
        starts.note("vLLM", with_flexkv=config.connector.transfer_config is not None)
        self._spawn()
        try:
            self._started.result(start_timeout)
        except (EngineError, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            killed = self.close(timeout=0 if late else STOP_TIMEOUT)
            reason = f"not ready within {start_timeout:.0f} s" if late else str(error)
            raise EngineStartError(
                f"the engine did not start ({config.connector.name}): {reason}", self.log(), killed
            ) from error
        except BaseException:
            self.close(timeout=0)
            raise
        self.start_seconds = time.monotonic() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Requests -------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 16,
        cache_salt: str | None = None,
        logprobs: bool = False,
        ignore_eos: bool = True,
        abort_after: float | None = None,
        adapter: Adapter | None = None,
        transfer_params: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Start a greedy generation and return at once, with a LoRA ``adapter`` or without.

        ``logprobs`` asks for those of the tokens that were chosen. ``abort_after`` seconds after
        the request was handed to vLLM it is aborted, if it still runs; the clock is the driver's,
        so short delays are kept. ``transfer_params`` are the request's ``kv_transfer_params``.
        """
        with self._lock:
            number = next(self._numbers)
            request_id = f"request-{number}-"
            generation = Generation(request_id, partial(self._abort, request_id))
            self._generations[number] = generation
        self._send(
            number,
            generation.future,
            op="generate",
            request_id=generation.request_id,
            prompt=list(prompt),
            max_tokens=max_tokens,
            cache_salt=cache_salt,
            logprobs=logprobs,
            ignore_eos=ignore_eos,
            abort_after=abort_after,
            adapter=None if adapter is None else [adapter.name, adapter.number, str(adapter.path)],
            transfer_params=None if transfer_params is None else dict(transfer_params),
        )
        return generation

    def _abort(self, request_id: str) -> bool:
        return bool(self.call("abort", target=request_id))

    def generate(self, prompt: Sequence[int], **options: Any) -> Completion:
        """Generate for one prompt and wait; options as in ``submit``."""
        return self.submit(prompt, **options).result()

    def generate_many(
        self,
        prompts: Iterable[Sequence[int]],
        *,
        all_queued: bool = False,
        timeout: float = CALL_TIMEOUT,
        **options: Any,
    ) -> list[Completion]:
        """Generate for all prompts at once; results in their order. ``all_queued`` has vLLM begin
        with none before all are in its queue, however slowly they get there."""
        with self._paused() if all_queued else contextlib.nullcontext():
            generations = [self.submit(prompt, **options) for prompt in prompts]
        wait([generation.future for generation in generations], timeout)
        return [generation.result(timeout=1.0) for generation in generations]

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        self.call("pause")
        try:
            yield
        finally:
            self.call("resume")

    # The engine -----------------------------------------------------------------------------------

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Empty vLLM's prefix cache (and the connector's cache, if asked).

        vLLM refuses while blocks are in use, also those that a connector still holds, so this asks
        again until ``CALL_TIMEOUT`` seconds have passed, then raises EngineError.
        """
        deadline = time.monotonic() + CALL_TIMEOUT
        while not self.call("reset_prefix_cache", reset_connector=reset_connector):
            if time.monotonic() > deadline:
                raise EngineError("the prefix cache could not be reset: blocks are in use")
            time.sleep(0.05)

    def forget(self) -> None:
        """Empty vLLM's prefix cache and overwrite its blocks (needs ``probe``).

        A hit after this comes from the connector, and so do its bytes.
        """
        if not self.config.connector.holds_blocks:
            self._await_copies()
        self.reset_prefix_cache()
        self.rpc("keeps_weights_scrub")

    def _await_copies(self) -> None:
        """Wait until OffloadingConnector copies nothing: vLLM, which would, does not know what the
        probe overwrites."""
        # It orders a request's last copies in the step after, and begins them one later still.
        self.generate([0], max_tokens=3)
        deadline = time.monotonic() + CALL_TIMEOUT
        while any(self.rpc("keeps_weights_offloading_jobs")):
            if time.monotonic() > deadline:
                raise EngineError("OffloadingConnector copies without an end")
            time.sleep(0.01)

    def metrics(self) -> list[dict[str, Any]]:
        """vLLM's metrics; see ``vllm.v1.metrics.reader``."""
        found: list[dict[str, Any]] = self.call("metrics")
        return found

    def counter(self, name: str, **labels: str) -> float:
        """Sum of a counter or gauge over all label sets that contain ``labels``; 0 if absent."""
        return sum(
            float(metric["value"])
            for metric in self.metrics()
            if metric["name"] == name
            and "value" in metric
            and labels.items() <= metric["labels"].items()
        )

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a worker method on every rank; results in rank order."""
        results: list[Any] = self.call("rpc", method=method, args=args)
        return results

    def call(self, op: str, *, timeout: float = CALL_TIMEOUT, **arguments: Any) -> Any:
        """Send one command and wait for its answer."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
        self._send(number, future, op=op, **arguments)
        return await_answer(future, op, timeout)

    # Processes ------------------------------------------------------------------------------------

    @property
    def group(self) -> int:
        """Id of the engine's process group: the pid of the driver."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has neither been closed nor died."""
        return not self._closed and self._process.poll() is None

    def pids(self) -> list[int]:
        """Pids of all living processes of the engine, the driver included."""
        return processes.group_pids(self.group)

    def memory(self) -> processes.Memory:
        """Memory of all processes of the engine."""
        return processes.memory_of(self.pids())

    def log(self) -> str:
        """All that the engine has printed so far."""
        return self.log_path.read_text(errors="replace")

    def kill(self) -> list[int]:
        """SIGKILL all processes at once, as a crash would; return their pids."""
        shm = processes.shm_files(self.pids())
        killed = processes.kill_group(self.group)
        self.close()
        self._note_leftovers(shm)
        return killed

    def close(self, timeout: float = STOP_TIMEOUT) -> list[int]:
        """Stop the engine; return the pids that did not end by themselves and were killed."""
        if self._closed:
            return []
        self._closed = True
        shm = processes.shm_files(self.pids())
        self._commands.close()
        stubborn = processes.wait_until_gone(self.group, timeout)
        if stubborn:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGTERM)
            processes.wait_until_gone(self.group, _TERM_SECONDS)
        processes.kill_group(self.group)
        self._process.wait()
        self._reader.join()
        self._note_leftovers(shm)
        return stubborn

    def _note_leftovers(self, shm: set[Path]) -> None:
        self.leftovers = {path for path in shm if path.exists()}
        for path in self.leftovers:
            path.unlink(missing_ok=True)

    def _spawn(self) -> None:
        command_read, command_write = os.pipe()
        event_read, event_write = os.pipe()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            env = self.config.environment()
            self._process: ForkedProcess | subprocess.Popen[bytes]
            if self.config.forked:
                self._process = fork_server().run(
                    _DRIVER, env, log.fileno(), passed=[command_read, event_write]
                )
            else:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _DRIVER, str(command_read), str(event_write)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(command_read, event_write),
                    process_group=0,
                    env=env,
                )
        os.close(command_read)
        os.close(event_write)
        self._commands = os.fdopen(command_write, "w", buffering=1)
        self._events = os.fdopen(event_read)
        self._reader = threading.Thread(target=self._read_events, name="engine-events", daemon=True)
        self._reader.start()
        self._write(self.config.engine_args())

    def _write(self, message: dict[str, Any]) -> None:
        # Not under the lock that the reader takes: a full pipe empties only while it reads.
        try:
            with self._writing:
                self._commands.write(json.dumps(message) + "\n")
        except (BrokenPipeError, ValueError) as error:
            raise EngineError("the engine is gone") from error

    def _send(self, number: int, future: Future[Any], **command: Any) -> None:
        with self._lock:
            self._pending[number] = future
        self._write({"id": number, **command})

    def _read_events(self) -> None:
        with self._events:
            for line in self._events:
                self._take(json.loads(line))
        self._fail_all(EngineError(f"the engine ended; its log is {self.log_path}"))

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"event": "ready"}:
                self._started.set_result(None)
            case {"event": "failed", "error": str(error)}:
                if not self._started.done():
                    self._started.set_exception(EngineError(error))
            case {"event": "first_token", "id": int(number)}:
                self._generations[number].note_first_token()
            case {"id": int(number)}:
                with self._lock:
                    future = self._pending.pop(number)
                    self._generations.pop(number, None)
                if "error" in message:
                    future.set_exception(EngineError(message["error"]))
                else:
                    future.set_result(message["result"])

    def _fail_all(self, error: EngineError) -> None:
        with self._lock:
            pending = list(self._pending.values())
            self._pending.clear()
            self._generations.clear()
        if not self._started.done():
            self._started.set_exception(error)
        for future in pending:
            future.set_exception(error)
