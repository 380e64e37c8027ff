# SPDX-License-Identifier: Apache-2.0
"""Owns a vLLM ``AsyncLLM`` and serves commands as JSON lines; ``engine.Engine`` is the client.

Run as ``python -m integration.harness.driver COMMAND_FD EVENT_FD`` with the engine's settings as
the first line on the command pipe. Commands carry a number ``id``, answers carry it back:
``{"id", "result"}`` or ``{"id", "error"}``, and ``{"id", "event": "first_token"}`` before the
result of a generation. The end of the command pipe ends the engine, so no engine outlives the
process that started it.

Time to first token is measured here, from just before the request is handed to vLLM to the first
streamed output with a token, on the monotonic clock.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import json
import os
import sys
import time
import traceback
from typing import IO, Any

Message = dict[str, Any]

# Longest line in bytes: one holds a whole prompt. asyncio's default of 64 KiB is too short, this
# is far beyond the longest context.
MAX_LINE = 1 << 30

# vLLM gives its processes 5 s to end and kills them then. On a busy machine some need longer, and
# an engine that was told to stop must not be killed before its connector has heard of it.
STOP_SECONDS = 120.0


class Events:
    """Writes messages to the event pipe, one line each."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def send(self, message: Message) -> None:
        """Write one message and flush it."""
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()


class Driver:
    """One engine and the commands under way in it.

    Every command is a task of its own. How the task ended is the answer, so no error is caught
    here: the client decides what it means.
    """

    def __init__(self, llm: Any, events: Events) -> None:
        self._llm = llm
        self._events = events
        self._tasks: set[asyncio.Task[Any]] = set()
        self._generations: dict[str, asyncio.Task[Message]] = {}

    def start(self, command: Message) -> None:
        """Start one command."""
        task: asyncio.Task[Any] = asyncio.ensure_future(
            getattr(self, "op_" + command["op"])(command)
        )
        self._tasks.add(task)
        if command["op"] == "generate":
            self._generations[command["request_id"]] = task
            if (delay := command["abort_after"]) is not None:
                asyncio.get_running_loop().call_later(delay, task.cancel)
        task.add_done_callback(functools.partial(self._answer, command))

    def stop(self) -> None:
        """Cancel what is still under way."""
        for task in self._tasks:
            task.cancel()

    def _answer(self, command: Message, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._generations.pop(command.get("request_id", ""), None)
        number = command["id"]
        if task.cancelled():
            result = {"tokens": [], "finish_reason": "abort"}
            self._events.send({"id": number, "result": result})
        elif (error := task.exception()) is not None:
            self._events.send({"id": number, "error": f"{type(error).__name__}: {error}"})
        else:
            self._events.send({"id": number, "result": task.result()})

    async def op_generate(self, command: Message) -> Message:
        """Generate for one prompt; cancelling the task aborts the request."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        prompt: Message = {"prompt_token_ids": command["prompt"]}
        if command["cache_salt"] is not None:
            prompt["cache_salt"] = command["cache_salt"]
        wishes = command["transfer_params"]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=command["max_tokens"],
            ignore_eos=command["ignore_eos"],
            detokenize=False,
            logprobs=0 if command["logprobs"] else None,
            output_kind=RequestOutputKind.DELTA,
            extra_args=None if wishes is None else {"kv_transfer_params": wishes},
        )
        adapter = None if command["adapter"] is None else LoRARequest(*command["adapter"])
        tokens: list[int] = []
        logprobs: list[float] = []
        times: list[float] = []
        cached, reason = None, None
        begin = time.monotonic()
        async for output in self._llm.generate(
            prompt, params, command["request_id"], lora_request=adapter
        ):
            now = time.monotonic()
            part = output.outputs[0]
            if part.token_ids and not tokens:
                self._events.send({"id": command["id"], "event": "first_token"})
            times.extend([now - begin] * len(part.token_ids))
            tokens.extend(part.token_ids)
            if part.logprobs:
                logprobs.extend(
                    row[token].logprob
                    for row, token in zip(part.logprobs, part.token_ids, strict=True)
                )
            if output.num_cached_tokens is not None:
                cached = output.num_cached_tokens
            reason = part.finish_reason or reason
        return {
            "tokens": tokens,
            "logprobs": logprobs,
            "times": times,
            "cached_tokens": cached,
            "finish_reason": reason,
        }

    async def op_abort(self, command: Message) -> bool:
        """Abort a generation; False when it is not (or no longer) running."""
        task = self._generations.get(command["target"])
        return task is not None and task.cancel()

    async def op_pause(self, command: Message) -> None:
        """Begin with no further request; they gather in the queue of vLLM's scheduler."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def op_resume(self, command: Message) -> None:
        """Go on, once all generations that were asked for have been sent to the scheduler."""
        sent = self._llm.output_processor.get_num_unfinished_requests
        while sent() < len(self._generations):
            await asyncio.sleep(0.001)
        await self._llm.resume_generation()

    async def op_reset_prefix_cache(self, command: Message) -> bool:
        """vLLM's own reset; True when it (and the connector, if asked) did it."""
        return bool(await self._llm.reset_prefix_cache(reset_connector=command["reset_connector"]))

    async def op_metrics(self, command: Message) -> list[Message]:
        """vLLM's Prometheus metrics as dicts with name, labels and the values."""
        from vllm.v1.metrics.reader import get_metrics_snapshot

        return [dataclasses.asdict(metric) for metric in get_metrics_snapshot()]

    async def op_rpc(self, command: Message) -> list[Any]:
        """Call a worker method on every rank; its results in rank order."""
        results: list[Any] = await self._llm.collective_rpc(
            command["method"], args=tuple(command["args"])
        )
        return results


async def serve(commands: asyncio.StreamReader, events: Events) -> None:
    """Start the engine that the first line describes and serve until the pipe ends."""
    settings = json.loads(await commands.readline())
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
    driver = Driver(llm, events)
    try:
        events.send({"event": "ready"})
        while line := await commands.readline():
            driver.start(json.loads(line))
        driver.stop()
    finally:
        llm.shutdown(timeout=STOP_SECONDS)
        # AsyncLLM shuts down in __del__ as well, which fails once the interpreter is ending.
        del llm, driver
        gc.collect()


async def main(command_fd: int, event_fd: int) -> int:
    """Connect the two pipes and serve them; return the exit status."""
    events = Events(os.fdopen(event_fd, "w"))
    reader = asyncio.StreamReader(limit=MAX_LINE)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(command_fd, "rb")
    )
    task = asyncio.ensure_future(serve(reader, events))
    await asyncio.wait([task])
    if (error := task.exception()) is None:
        return 0
    traceback.print_exception(error)  # as vLLM's own server does, which ends by it
    events.send({"event": "failed", "error": f"{type(error).__name__}: {error}"})
    return 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]))))
