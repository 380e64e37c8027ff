# SPDX-License-Identifier: Apache-2.0
"""Time to first token of hits and of misses on a real SGLang that computes on a CPU.

Servers without FlexKV, with it, and with HiCache over its file backend live at the same time and
take turns with each request, so that a drift of the machine hits all. A server that waits sleeps.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from integration.bench.rows import Goal, Row, ratio_row
from integration.bench.setup import ARENA_GB, BATCHED_TOKENS, Bench
from integration.harness.answers import Completion
from integration.harness.checkpoint import BENCH, write_checkpoint
from integration.sglang.hicache import hicache_config
from integration.sglang.linker import linker_config
from integration.sglang.server import ServerConfig, SglangServer

LENGTHS = (4090, 8190)
MISS_LENGTH = 4090
"""Computing 8,190 tokens takes SGLang's attention for CPUs three times as long."""
PAGE_TOKENS = 64
"""What the quickstart recommends."""
KV_TOKENS = 4 * LENGTHS[-1]
"""Room for what one round asks for, twice."""
PATIENCE = 60.0
WITH, WITHOUT, HICACHE = "FlexKV", "none", "HiCache"
_FILES = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"

Samples = dict[tuple[str, str, int], list[float]]
Servers = Mapping[str, SglangServer]


def sglang_rows(bench: Bench, say: Callable[[str], None]) -> list[Row]:
    """All rows of SGLang."""
    samples: Samples = defaultdict(list)
    for start in range(1, bench.pairs + 1):
        say(f"start {start} of {bench.pairs}: SGLang without FlexKV, with it, and with HiCache")
        with _servers(bench, bench.folder / f"sglang-{start}") as servers:
            prompts = {length: bench.fresh_prompt(length) for length in LENGTHS}
            _warm_up(bench, servers, prompts)
            for number in range(bench.samples):
                say(f"round {number + 1} of {bench.samples}")
                _measure_misses(bench, servers, number, samples)
                for prompt in prompts.values():
                    _measure_hits(servers, prompt, samples)
    return _rows(samples)


def _rows(samples: Samples) -> list[Row]:
    rows = []
    for length in LENGTHS:
        host = ("host hit", samples["host hit", WITH, length])
        what = f"SGLang: TTFT at {length:,} tokens"
        for where, kind in (("same server", WITH), ("server without FlexKV", WITHOUT)):
            own = ("own hit", samples["own hit", kind, length])
            name = f"{what}, host hit ÷ SGLang's own hit, {where}"
            rows.append(ratio_row(name, Goal("<=", 1.25), host, own))
        files = ("HiCache", samples["file hit", HICACHE, length])
        name = f"{what}, host hit ÷ hit of HiCache's file backend"
        rows.append(ratio_row(name, Goal("<=", 1.0), host, files))
    with_it = ("with", samples["miss", WITH, MISS_LENGTH])
    without = ("without", samples["miss", WITHOUT, MISS_LENGTH])
    what = f"SGLang: TTFT at {MISS_LENGTH:,} tokens"
    rows.append(
        ratio_row(f"{what}, all misses, with ÷ without FlexKV", Goal("<=", 1.03), with_it, without)
    )
    host = ("host hit", samples["host hit", WITH, MISS_LENGTH])
    rows.append(ratio_row(f"{what}, host hit ÷ computing", None, host, without))
    return rows


def _warm_up(bench: Bench, servers: Servers, prompts: Mapping[int, list[int]]) -> None:
    """A server's first steps are slow: it loads what it needs only then. Later ones hit."""
    for server in servers.values():
        for prompt in (bench.fresh_prompt(300), *prompts.values()):
            _ask(server, prompt, most=0)
    _wait_for_files(servers[HICACHE], sum(prompts) // PAGE_TOKENS)
    for prompt in prompts.values():
        _measure_hits(servers, prompt, defaultdict(list))


def _wait_for_files(server: SglangServer, pages: int) -> None:
    """HiCache writes a file for each page, some time after the answer."""
    folder = Path(server.config.env[_FILES])
    deadline = time.monotonic() + PATIENCE
    while (found := sum(1 for _ in folder.iterdir())) < pages:
        if time.monotonic() > deadline:
            raise RuntimeError(f"HiCache wrote {found} of {pages} files within {PATIENCE:.0f} s")
        time.sleep(0.1)


def _measure_misses(bench: Bench, servers: Servers, number: int, samples: Samples) -> None:
    """One miss of each server; the first one in each round is another."""
    order = (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH)
    for kind in order:
        answer = _ask(servers[kind], bench.fresh_prompt(MISS_LENGTH), most=0)
        samples["miss", kind, MISS_LENGTH].append(answer.ttft)


def _measure_hits(servers: Servers, prompt: list[int], samples: Samples) -> None:
    """One hit of each kind."""
    length = len(prompt)

    def hit(what: str, kind: str, source: str) -> None:
        answer = _ask(servers[kind], prompt, least=length, source=source)
        samples[what, kind, length].append(answer.ttft)

    servers[WITH].flush()
    hit("host hit", WITH, "host")
    hit("own hit", WITH, "device")
    hit("own hit", WITHOUT, "device")
    servers[HICACHE].flush()  # both of SGLang's tiers; files stay
    hit("file hit", HICACHE, "storage")


def _ask(
    server: SglangServer,
    prompt: list[int],
    *,
    least: int = 0,
    most: int | None = None,
    source: str | None = None,
) -> Completion:
    """The first token.

    Args:
        least: of tokens that must be a hit, but for a tenth.
        most: tokens that may be one.
        source: of SGLang's `cached_tokens_details` that nearly all of a hit must come from.
    """
    answer, meta = server.stream(prompt, 1)
    found = answer.cached_tokens or 0
    if source is not None:
        found = int((meta["cached_tokens_details"] or {}).get(source) or 0)
    if found < 0.9 * least or (most is not None and found > most):
        allowed = f"at least {least}" if most is None else f"at most {most}"
        raise RuntimeError(f"{found} tokens were cached ({meta}); needed: {allowed}")
    return answer


@contextmanager
def _servers(bench: Bench, folder: Path) -> Iterator[Servers]:
    """One server of each kind. They start at once, since most of a start does not compute."""
    model = write_checkpoint(BENCH, bench.folder)
    configs = {kind: _config(model, kind, folder) for kind in (WITHOUT, WITH, HICACHE)}
    with ExitStack() as stack, ThreadPoolExecutor(len(configs)) as pool:
        started = {
            kind: pool.submit(SglangServer, config, folder / f"{kind}.log")
            for kind, config in configs.items()
        }
        for each in started.values():
            stack.callback(_end, each)
        yield {kind: each.result() for kind, each in started.items()}


def _end(start: Future[SglangServer]) -> None:
    """End a server, if it has started."""
    if start.exception() is None:
        start.result().close()


def _config(model: Path, kind: str, folder: Path) -> ServerConfig:
    if kind == WITH:
        settings = {
            "FLEXKV_CPU_CACHE_GB": str(ARENA_GB),
            "FLEXKV_RUNTIME_DIR": str(folder / "run"),
        }
        config = linker_config(model, BENCH, settings)
    elif kind == HICACHE:
        config = hicache_config(
            model,
            BENCH,
            {},
            hicache_storage_backend="file",
            hicache_storage_backend_extra_config={"prefetch_threshold": 2 * PAGE_TOKENS},
        )
        config = dataclasses.replace(config, env={_FILES: str(folder / "files")})
    else:
        config = ServerConfig(model, BENCH)
    flags = {"enable_cache_report": True, "sleep_on_idle": True, "context_length": KV_TOKENS}
    return dataclasses.replace(
        config,
        page_size=PAGE_TOKENS,
        kv_tokens=KV_TOKENS,
        chunked_prefill=BATCHED_TOKENS,
        flags=dict(config.flags) | flags,
    )
