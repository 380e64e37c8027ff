# SPDX-License-Identifier: Apache-2.0
"""`python -m integration.demo`: runs the demo. Exit status 0 only if all is well."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from flexkv.host.available import available_memory
from integration.demo import chart, engines, options, screen
from integration.demo.conversation import Turn, converse
from integration.demo.engines import Backend, ModelError, Setup
from integration.demo.options import OptionError, Options
from integration.demo.plan import PlanError, make_plan
from integration.demo.text import Text, TextError, load_text
from integration.demo.verdict import Pair, judge
from integration.harness import connector
from integration.harness.connector import Connector
from integration.harness.engine import EngineError, EngineStartError

# What vLLM itself counts of the tokens that a connector brought.
LOADED_TOKENS = "vllm:external_prefix_cache_hits"
# 6,000 tokens take the random model about 3 s on two cores; a GPU does far more in that time.
TEXT_TOKENS_CPU, TEXT_TOKENS_GPU = 6_000, 20_000
ANSWER_TOKENS_RANDOM, ANSWER_TOKENS_MODEL = 32, 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status."""
    asked = options.parse(arguments)
    console = Console(highlight=False)
    try:
        asked.check_outputs()
        with tempfile.TemporaryDirectory(prefix="flexkv-demo-") as folder:
            return _demo(console, asked, Path(folder))
    except EngineStartError as error:
        log = asked.json.with_name("demo-engine.log")
        log.write_text(error.log, encoding="utf-8")
        cause = engines.root_cause(error)
        console.print(
            f"vLLM did not start: {cause}\nIts log: {log}",
            style="red",
            markup=False,
            soft_wrap=True,
        )
        return 1
    except (OptionError, TextError, ModelError, PlanError, EngineError, OSError) as error:
        console.print(f"The demo stopped: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 130


def _demo(console: Console, asked: Options, folder: Path) -> int:
    console.print("Preparing text and model ...", style="dim")
    text = load_text(asked.text)
    setup = _set_up(asked, text, folder)
    cache = asked.cpu_cache_gb or engines.cache_gb(setup)
    _check_memory(cache)
    facts = _facts(setup, text, cache)
    screen.introduce(console, facts)
    connectors = {
        screen.WITHOUT: connector.NONE,
        screen.WITH: connector.plugin() if cache is None else connector.plugin(cpu_cache_gb=cache),
    }
    pairs, loaded = _converse(console, setup, connectors, folder)
    verdict = judge(pairs, loaded)
    if asked.show_answers:
        for pair in pairs:
            screen.show_answer(console, pair, setup.model.chat.decode(pair.with_flexkv.tokens))
    screen.show_verdict(console, verdict, random=setup.model.random)
    chart.draw(pairs, verdict, facts, asked.out)
    report = {
        "facts": facts,
        "verdict": asdict(verdict) | {"speedup": verdict.speedup, "passed": verdict.passed},
        "turns": [asdict(pair) for pair in pairs],
    }
    asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"\nChart: {asked.out}   Figures: {asked.json}", markup=False)
    return 0 if verdict.passed else 1


def _set_up(asked: Options, text: Text, folder: Path) -> Setup:
    backend = engines.find_backend()
    if asked.model is None:
        model = engines.random_model(folder)
    else:
        model = engines.hub_model(asked.model, asked.dtype or _default_dtype(backend))
    plan = make_plan(
        model.chat,
        text,
        users=asked.users,
        turns=asked.turns,
        text_tokens=asked.tokens or (TEXT_TOKENS_GPU if backend.gpu else TEXT_TOKENS_CPU),
        answer_tokens=asked.answer_tokens
        or (ANSWER_TOKENS_RANDOM if model.random else ANSWER_TOKENS_MODEL),
        kv_conversations=asked.kv_conversations or asked.users / 2,
        model_limit=model.context,
    )
    return Setup(backend, model, plan)


def _check_memory(cache: float | None) -> None:
    # FlexKV checks this itself, but here it would do so only after the run without it.
    available = available_memory() / engines.GIB
    if cache is not None and cache > available:
        raise OptionError(
            f"{cache:g} GiB of host memory for FlexKV (--cpu-cache-gb, or what the conversations "
            f"need) are not there; allowed: at most {available:.2f}, what is available now"
        )


def _default_dtype(backend: Backend) -> str:
    # float32 where there is a choice, see `engines.random_model`. The attention kernels of GPUs
    # mostly leave none, so there it is the model's own.
    return "auto" if backend.gpu else "float32"


def _facts(setup: Setup, text: Text, cache: float | None) -> dict[str, str]:
    backend, model, plan = setup.backend, setup.model, setup.plan
    device = "GPU" if backend.gpu else f"CPU, {len(os.sched_getaffinity(0))} cores"
    memory = "its default" if cache is None else f"{cache:g} GiB"
    return {
        "engine": f"vLLM {backend.version} on {device}",
        "model": model.name,
        "text": f"{text.name}, by the tokenizer of {model.chat.name}",
        "talk": f"{plan.users} users take turns, {plan.turns} turns each; a conversation grows to "
        f"{plan.conversation_tokens:,} tokens",
        "KV cache": f"vLLM's own holds {plan.conversations_in_kv:.1f} conversations "
        "(its prefix caching is on in both runs)",
        "FlexKV": f"{memory} of host memory",
    }


def _converse(
    console: Console, setup: Setup, connectors: dict[str, Connector], folder: Path
) -> tuple[list[Pair], int]:
    """Hold the conversations with one engine after the other.

    Returns the turns side by side, and how many tokens the last engine's connector brought.
    """
    runs: list[list[Turn]] = []
    loaded = 0
    with screen.Screen(console, list(setup.plan.questions), setup.plan.turns) as display:
        for run, chosen in connectors.items():
            display.say(f"starting vLLM {run}")
            log = folder / f"engine-{len(runs)}.log"
            with engines.running_engine(setup, chosen, log) as engine:
                display.say(f"talking to vLLM {run}")
                runs.append([])
                for turn in converse(engine, setup):
                    runs[-1].append(turn)
                    display.add(run, turn)
                loaded = int(engine.counter(LOADED_TOKENS))
                display.say(f"stopping vLLM {run}")
    console.print(display.table())
    console.print()
    return [Pair(*turns) for turns in zip(*runs, strict=True)], loaded


if __name__ == "__main__":
    sys.exit(main())
