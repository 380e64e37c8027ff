# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that others wrote, before an engine without FlexKV and before one with it:
`python -m integration.clients.benchmark_tools`.

Each engine is a real server with a small random model, on this machine. A client's own command runs
as its users type it; what it reports is printed beside what the engine counted meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.clients.worded_model import small_model
from integration.harness import connector
from integration.harness.checkpoint import write_checkpoint
from integration.harness.config import EngineConfig
from integration.harness.http_server import HttpServer, spawned
from integration.harness.tokenizers import write_bytes
from integration.sglang import environment as sglang
from integration.sglang.linker import linker_config
from integration.sglang.server import ServerConfig, SglangServer

_SPEC = small_model(512)
_MODEL_LENGTH = 6144
_OWN_TOKENS = 8192
"""Tokens of the engine's own cache: less than the prompts of each benchmark have together."""
_HOST_GIB = 2.0
_HUB_NAME = "flexkv/bytes"
"""By which a client finds the model among those that were downloaded: aiperf takes no folder when
it replays a trace."""
_VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` runs. `vllm` itself asks for the version of a package of that name, which
vLLM's wheel for CPUs does not have."""
_TEMPLATE = "{% for each in messages %}{{ each['content'] }} {% endfor %}"
_CLIENT_SECONDS = 1800.0
_BLOCK = 64
"""Tokens of a block of the shortened trace."""
_ROWS, _CONVERSATIONS, _LEAST, _MOST = 4000, 12, 6000, 40_000
"""Of the trace: how much of it is read, and how many conversations with prompts of which lengths
are taken."""

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Tool:
    """A benchmark client.

    Attributes:
        engine: that it runs before, `vllm` or `sglang`.
        command: its command line for the URL of the server, the folder of the model, and a folder
            for what it writes.
        read: what it reported, from that folder.
        env: what its process needs.
    """

    engine: str
    command: Callable[[str, Path, Path], list[str]]
    read: Callable[[Path], Figures]
    env: Mapping[str, str]


def _vllm_bench(url: str, model: Path, out: Path) -> list[str]:
    return [
        *(sys.executable, "-c", _VLLM_BENCH, "--base-url", url),
        *("--model", "bytes", "--tokenizer", str(model), "--max-concurrency", "1"),
        *("--dataset-name", "prefix_repetition", "--num-prompts", "72"),
        *("--prefix-repetition-num-prefixes", "12", "--prefix-repetition-prefix-len", "1600"),
        *("--prefix-repetition-suffix-len", "100", "--prefix-repetition-output-len", "8"),
        *("--save-result", "--result-dir", str(out), "--result-filename", "result.json"),
    ]


def _sglang_bench(url: str, model: Path, out: Path) -> list[str]:
    return [
        *(str(sglang.python()), "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"),
        *("--base-url", url, "--model", "bytes", "--tokenizer", str(model)),
        *("--dataset-name", "generated-shared-prefix", "--max-concurrency", "8"),
        *("--gsp-num-groups", "8", "--gsp-prompts-per-group", "1", "--gsp-num-turns", "4"),
        *("--gsp-system-prompt-len", "1200", "--gsp-question-len", "200"),
        *("--gsp-output-len", "8", "--output-file", str(out / "result.json")),
    ]


def _aiperf(*workload: str) -> Callable[[str, Path, Path], list[str]]:
    def command(url: str, model: Path, out: Path) -> list[str]:
        return [
            *(os.environ.get("AIPERF", "aiperf"), "profile", "--url", url, "--model", "bytes"),
            *("--tokenizer", _HUB_NAME, "--endpoint-type", "chat", "--streaming"),
            *("--extra-inputs", "ignore_eos:true"),
            *("--output-artifact-dir", str(out), "--ui-type", "none", *workload),
        ]

    return command


def _of_bench(out: Path) -> Figures:
    found = json.loads((out / "result.json").read_text().splitlines()[-1])
    return {
        "requests": found["completed"],
        "first token, mean ms": found["mean_ttft_ms"],
        "first token, p99 ms": found["p99_ttft_ms"],
        "further token, mean ms": found["mean_tpot_ms"],
    }


def _of_aiperf(out: Path) -> Figures:
    (result,) = out.rglob("profile_export_aiperf.json")
    found = json.loads(result.read_text())
    return {
        "requests": found["request_count"]["avg"],
        "first token, mean ms": found["time_to_first_token"]["avg"],
        "first token, p99 ms": found["time_to_first_token"]["p99"],
        "further token, mean ms": found["inter_token_latency"]["avg"],
    }


def tools(trace: Path) -> dict[str, Tool]:
    """The clients; `trace` is replayed."""
    turns = _aiperf(
        *("--conversation-num", "12", "--conversation-turn-mean", "4", "--concurrency", "12"),
        *("--prompt-input-tokens-mean", "700", "--prompt-output-tokens-mean", "8"),
        *("--random-seed", "7"),
    )
    replay = _aiperf(
        *("--input-file", str(trace), "--custom-dataset-type", "mooncake_trace"),
        *("--isl-block-size", str(_BLOCK), "--fixed-schedule", "--random-seed", "7"),
    )
    offline = {"HF_HUB_OFFLINE": "1"}
    datasets = {"PYTHONPATH": os.environ.get("DATASETS_PATH", "")}
    return {
        "vllm bench serve": Tool("vllm", _vllm_bench, _of_bench, {}),
        "sglang.bench_serving": Tool("sglang", _sglang_bench, _of_bench, datasets),
        "aiperf, turns": Tool("vllm", turns, _of_aiperf, offline),
        "aiperf, trace": Tool("vllm", replay, _of_aiperf, offline),
    }


def write_trace(source: Path, folder: Path) -> Path:
    """Of a trace in Mooncake's form: the first conversations that go on, an eighth as long, a
    request each 1.5 seconds, in their order."""
    rows = [json.loads(line) for line in source.read_text().splitlines()[:_ROWS]]
    groups: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if _LEAST <= row["input_length"] <= _MOST:
            groups.setdefault(tuple(row["hash_ids"][:3]), []).append(row)
    chosen = [each for each in groups.values() if len(each) > 2][:_CONVERSATIONS]
    made = folder / "trace.jsonl"
    with made.open("w") as file:
        ordered = sorted((row for each in chosen for row in each), key=lambda row: row["timestamp"])
        for number, row in enumerate(ordered):
            full = _BLOCK * (len(row["hash_ids"]) - 1)  # tokens before the last block
            short = {
                "timestamp": 1500 * number,
                "input_length": min(max(full + 1, row["input_length"] // 8), full + _BLOCK),
                "output_length": 8,
                "hash_ids": row["hash_ids"],
            }
            print(json.dumps(short), file=file)
    return made


@contextlib.contextmanager
def serve(engine: str, model: Path, *, flexkv: bool, folder: Path) -> Iterator[HttpServer]:
    """A server with or without FlexKV."""
    settings = {"FLEXKV_CPU_CACHE_GB": str(_HOST_GIB), "FLEXKV_RUNTIME_DIR": str(folder / "run")}
    log = folder / "server.log"
    if engine == "sglang":
        options: dict[str, Any] = {"kv_tokens": _OWN_TOKENS}
        flags = {
            "skip_tokenizer_init": False,
            "served_model_name": "bytes",
            "context_length": _MODEL_LENGTH,
            "enable_metrics": True,
        }
        config = ServerConfig(model, _SPEC, flags=flags, **options)
        if flexkv:
            config = linker_config(model, _SPEC, settings, flags=flags, **options)
        with SglangServer(config, log) as server:
            yield server
        return
    chosen = EngineConfig(
        model,
        _SPEC.dtype,
        connector.plugin(runtime_dir=str(folder / "run"), cpu_cache_gb=_HOST_GIB)
        if flexkv
        else connector.NONE,
        max_model_len=_MODEL_LENGTH,
        block_size=32,
        num_blocks=_OWN_TOKENS // 32,
        extra_args={"skip_tokenizer_init": False, "served_model_name": "bytes"},
    )
    start = spawned([sys.executable, "-m", "vllm.entrypoints.openai.api_server"])
    arguments, env = chosen.engine_args(), chosen.environment()
    with HttpServer("vLLM", start, arguments, env, log) as server:
        yield server


def _counted(server: HttpServer) -> tuple[float, float]:
    """Prompt tokens that the engine has had, and those that it has not computed."""
    totals: dict[str, float] = {}
    for line in server.metrics().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            totals[name] = totals.get(name, 0.0) + float(value)
    prompts = totals.get("vllm:prompt_tokens_total", totals.get("sglang:prompt_tokens_total", 0.0))
    own = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
    return prompts, sum(totals.get(name, 0.0) for name in (*own, "sglang:cached_tokens_total"))


def measure(tool: Tool, model: Path, *, flexkv: bool) -> Figures:
    """Run a client before a new server.

    Raises:
        subprocess.CalledProcessError: the client ended with an error, which it has printed.
        subprocess.TimeoutExpired: it did not end.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serve(tool.engine, model, flexkv=flexkv, folder=folder) as server:
            url = f"http://127.0.0.1:{server.address[1]}"
            before = _counted(server)
            command = tool.command(url, model, folder / "out")
            (folder / "out").mkdir()
            subprocess.run(
                command,
                check=True,
                env={**os.environ, **tool.env, "HF_HOME": str(model.parent)},
                stdout=sys.stderr,
                timeout=_CLIENT_SECONDS,
            )
            prompts, cached = (
                now - then for now, then in zip(_counted(server), before, strict=True)
            )
        return {"prompt tokens cached, %": 100 * cached / prompts} | tool.read(folder / "out")


def main() -> None:
    """Run the chosen clients, and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="in Mooncake's form")
    parser.add_argument("--only", nargs="*", help="parts of the clients' names")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = write_checkpoint(_SPEC, Path(name))
        write_bytes(model, _SPEC.vocab)
        (model / "chat_template.jinja").write_text(_TEMPLATE)
        hub = Path(name, "hub", f"models--{_HUB_NAME.replace('/', '--')}")
        shutil.copytree(model, hub / "snapshots" / "1")
        (hub / "refs").mkdir()
        (hub / "refs" / "main").write_text("1")
        for title, tool in tools(write_trace(args.trace, Path(name))).items():
            if args.only and not any(part in title for part in args.only):
                continue
            print(shlex.join(tool.command("URL", Path("MODEL"), Path("OUT"))))
            without, with_it = (measure(tool, model, flexkv=flexkv) for flexkv in (False, True))
            print(f"| {title} | without | with FlexKV |")
            for figure, value in without.items():
                print(f"| {figure} | {value:.1f} | {with_it[figure]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
