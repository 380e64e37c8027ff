# SPDX-License-Identifier: Apache-2.0
"""`python -m integration.demo`: runs the demo. Exit status 0 only if all is well."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from flexkv.system.available import available_memory
from integration.demo import chart, engines, options, screen
from integration.demo.conversation import Conversations, Turn
from integration.demo.engines import Backend, ModelError, Setup, Way
from integration.demo.options import OptionError, Options
from integration.demo.plan import PlanError, make_plan
from integration.demo.text import Text, TextError, load_text
from integration.demo.verdict import Pair, Results, judge
from integration.harness.answers import EngineError, EngineStartError
from integration.interrupts import interrupt_at_sigterm

# 6,000 tokens take the random model about 3 s on two cores; a GPU does far more in that time.
TEXT_TOKENS_CPU, TEXT_TOKENS_GPU = 6_000, 20_000
# Of the memory's size, for what lies beside the blocks.
DISK_MARGIN = 1.05
ANSWER_TOKENS_RANDOM, ANSWER_TOKENS_MODEL = 32, 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status."""
    asked = options.parse(arguments)
    console = Console(highlight=False)
    try:
        asked.check_outputs()
        asked.check_model()
        with tempfile.TemporaryDirectory(prefix="flexkv-demo-") as folder:
            return _demo(console, asked, Path(folder))
    except EngineStartError as error:
        log = asked.json.with_name("demo-engine.log")
        log.write_text(error.log, encoding="utf-8")
        cause = engines.root_cause(error)
        console.print(
            f"The engine did not start: {cause}\nIts log: {log}",
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
    runs = _runs(setup, cache, folder, restart=not asked.no_restart)
    facts = _facts(setup, text, cache, disk=screen.RESTARTED in runs)
    screen.introduce(console, facts)
    results = _converse(console, setup, runs, folder)
    verdict = judge(results)
    if asked.show_answers:
        for pair in results.pairs:
            screen.show_answer(console, pair, setup.model.chat.decode(pair.with_flexkv.tokens))
    screen.show_verdict(console, verdict, random=setup.model.random)
    chart.draw(results, verdict, facts, asked.out)
    report = {
        "facts": facts,
        "verdict": asdict(verdict)
        | {"speedup": verdict.speedup, "passed": verdict.passed}
        | {"is_fair": verdict.is_fair},
        "turns": [asdict(pair) for pair in results.pairs],
        "restarts": [asdict(pair) for pair in results.restarts],
        "example": [asdict(turn) for turn in results.example],
    }
    asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console.print(f"\nChart: {asked.out}   Figures: {asked.json}", markup=False)
    return 0 if verdict.passed else 1


def _set_up(asked: Options, text: Text, folder: Path) -> Setup:
    backend = engines.find_backend(asked.engine)
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


def _facts(setup: Setup, text: Text, cache: float | None, *, disk: bool) -> dict[str, str]:
    backend, model, plan = setup.backend, setup.model, setup.plan
    device = "GPU" if backend.gpu else f"CPU, {len(os.sched_getaffinity(0))} cores"
    memory = "its default" if cache is None else f"{cache:g} GiB"
    return {
        "engine": f"{backend.name} {backend.version} on {device}",
        "model": model.name,
        "text": f"{text.name}, by the tokenizer of {model.chat.name}",
        "talk": f"{plan.users} users take turns, {plan.turns} turns each; a conversation grows to "
        f"{plan.conversation_tokens:,} tokens",
        "KV cache": f"{backend.name}'s own holds {plan.conversations_in_kv:.1f} conversations "
        "(its prefix caching is on in all runs)",
        "FlexKV": f"{memory} of host memory" + (", and as much on disk" if disk else ""),
    }


def _runs(setup: Setup, cache: float | None, folder: Path, *, restart: bool) -> dict[str, Way]:
    """The engines, in the order in which they run."""
    runs = {screen.WITHOUT: Way()}
    # With a large model it would fill the disk with every prompt anew.
    if setup.model.random and setup.backend.name == "vLLM":
        runs[screen.EXAMPLE] = Way(example=folder / "example")
    settings: dict[str, Any] = {} if cache is None else {"cpu_cache_gb": cache}
    disk = cache * DISK_MARGIN if restart and cache is not None else None
    if disk is None or shutil.disk_usage(folder).free < 2 * disk * engines.GIB:
        return runs | {screen.WITH: Way(settings)}
    flexkv = Way(settings | {"ssd_cache_gb": disk, "ssd_cache_dir": str(folder / "disk")})
    return runs | {screen.WITH: flexkv, screen.RESTARTED: flexkv}


def _converse(console: Console, setup: Setup, runs: dict[str, Way], folder: Path) -> Results:
    """Hold the conversations with one engine after the other."""
    done: dict[str, list[Turn]] = {screen.EXAMPLE: [], screen.RESTARTED: []}
    loaded = {screen.RESTARTED: 0}
    talk = Conversations(setup)
    plan, name = setup.plan, setup.backend.name
    with screen.Screen(console, list(plan.questions), plan.turns, list(runs), name) as display:
        for run, chosen in runs.items():
            display.say(f"starting {name} {run}")
            log = folder / f"engine-{len(loaded)}.log"
            done[run] = []
            with engines.running_engine(setup, chosen, log) as engine:
                display.say(f"talking to {name} {run}")
                if run != screen.RESTARTED:
                    talk = Conversations(setup)
                    turns = talk.turns(engine)
                else:
                    turns = talk.last_turns_again(engine)
                for turn in turns:
                    done[run].append(turn)
                    display.add(run, turn)
                loaded[run] = engine.loaded_tokens()
                display.say(f"stopping {name} {run}")
                if run == screen.WITH and screen.RESTARTED in runs:
                    engine.kill_when_written()
    console.print(display.table())
    console.print()
    without, restarted = done[screen.WITHOUT], done[screen.RESTARTED]
    last = without[len(without) - len(restarted) :]
    return Results(
        pairs=[Pair(*turns) for turns in zip(without, done[screen.WITH], strict=True)],
        loaded_tokens=loaded[screen.WITH],
        restarts=[Pair(*turns) for turns in zip(last, restarted, strict=True)],
        restored_tokens=loaded[screen.RESTARTED],
        example=done[screen.EXAMPLE],
    )


if __name__ == "__main__":
    interrupt_at_sigterm()
    sys.exit(main())
