# SPDX-License-Identifier: Apache-2.0
"""The demo's command line."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from integration.demo.plan import USERS

ENGINES = ("vllm", "sglang")
CHART_FORMATS = (".png", ".svg", ".pdf")


class OptionError(ValueError):
    """An option's value cannot be used; the message names it and what is allowed."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for; None where the default depends on the model or the machine."""

    engine: str
    text: Path | None
    model: str | None
    dtype: str | None
    users: int
    turns: int
    tokens: int | None
    answer_tokens: int | None
    kv_conversations: float | None
    cpu_cache_gb: float | None
    no_restart: bool
    show_answers: bool
    out: Path
    json: Path

    def check_model(self) -> None:
        """Raise OptionError for a model that the chosen engine is not given here."""
        if self.engine == "sglang" and self.model is not None:
            raise OptionError(
                f"--model is {self.model!r} with --engine sglang; allowed: the model that the demo "
                "makes on the spot, or --engine vllm"
            )

    def check_outputs(self) -> None:
        """Raise OptionError where a result could not be written, before minutes of work."""
        for name, path in (("--out", self.out), ("--json", self.json)):
            folder = path.resolve().parent
            if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
                raise OptionError(
                    f"{path} from {name} cannot be written; allowed: a file in a folder that "
                    "exists and can be written"
                )
        if self.out.suffix.lower() not in CHART_FORMATS:
            raise OptionError(
                f"{self.out} from --out is no format of the chart; allowed: a name that ends in "
                f"{', '.join(CHART_FORMATS)}"
            )


def parse(arguments: Sequence[str] | None) -> Options:
    """Parse the command line; None is the process's own. Exits on errors, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="nox -s demo --",
        description="Users take turns at a real engine, first without FlexKV, then with it, then "
        "after a kill and a new start.",
    )
    add = parser.add_argument
    add(
        "--engine", choices=ENGINES, default=ENGINES[0], help="(default: vllm); sglang runs on CPUs"
    )
    add(
        "--text", type=Path, metavar="FILE", help="what to talk about (default: Python's reference)"
    )
    add("--model", metavar="NAME", help="a model: its directory or name on the Hugging Face Hub")
    add("--dtype", help="of --model, as vLLM takes it (default: float32 on CPUs, auto on GPUs)")
    add("--users", type=_whole(2, len(USERS)), default=3, metavar="N", help="(default: 3)")
    add("--turns", type=_whole(2, 100), default=4, metavar="N", help="of each user (default: 4)")
    add(
        "--tokens",
        type=_whole(256),
        metavar="N",
        help="of text that each user brings (default: 6000 on CPUs, 20000 on GPUs)",
    )
    add(
        "--answer-tokens",
        type=_whole(1),
        metavar="N",
        help="per answer (default: 32, with --model 128)",
    )
    add(
        "--kv-conversations",
        type=_number(1),
        metavar="X",
        help="whole conversations that fit into the engine's own KV cache "
        "(default: half of the users')",
    )
    add(
        "--cpu-cache-gb",
        type=_number(0),
        metavar="GIB",
        help="host memory for FlexKV (default: what the conversations need)",
    )
    add("--no-restart", action="store_true", help="do not kill the engine and start it again")
    add("--show-answers", action="store_true", help="print the answers at the end")
    add("--out", type=Path, default=Path("demo.png"), metavar="FILE", help="(default: demo.png)")
    add("--json", type=Path, default=Path("demo.json"), metavar="FILE", help="(default: demo.json)")
    return Options(**vars(parser.parse_args(arguments)))


def _whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """A type for argparse: a whole number within bounds."""
    allowed = f"a whole number from {low}" + (f" to {high}" if high is not None else " on")

    def read(value: str) -> int:
        if not value.isdecimal() or int(value) < low or (high is not None and int(value) > high):
            raise argparse.ArgumentTypeError(f"{value!r} is not allowed; allowed: {allowed}")
        return int(value)

    return read


def _number(low: float) -> Callable[[str], float]:
    """A type for argparse: a number from `low` on, and above 0."""

    def read(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number >= low and number > 0):
            allowed = f"a number from {low:g} on" if low else "a number above 0"
            raise argparse.ArgumentTypeError(f"{value!r} is not allowed; allowed: {allowed}")
        return number

    return read
