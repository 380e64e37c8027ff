# SPDX-License-Identifier: Apache-2.0
"""`python -m integration.campaign`: exit status 0 only if all holds."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path

from integration.campaign.engine import Engine
from integration.campaign.report import Report
from integration.campaign.run import Campaign
from integration.campaign.sglang import STATES, WINDOWS, Sglang
from integration.campaign.stores import SharedStores
from integration.campaign.vllm import Vllm
from integration.interrupts import interrupt_at_sigterm

ENGINES: dict[str, Engine] = {
    "vllm": Vllm(),
    "sglang": Sglang(),
    "sglang-windows": Sglang(family=WINDOWS),
    "sglang-states": Sglang(family=STATES),
    "sglang-stages": Sglang(stages=2),
}


def main() -> int:
    """Run it and return the exit status."""
    options = _parse()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="flexkv-campaign-") as made:
        folder = options.folder or Path(made)
        engine = ENGINES[options.engine]
        policy = options.policy or next(iter(engine.policies))
        say("asking an engine without FlexKV")
        questions = engine.reference(folder, options.seed)
        say(f"{len(questions)} prompts; {options.clients} clients, policy {policy}")
        with contextlib.ExitStack() as started:
            campaign = Campaign(
                engine,
                folder,
                questions,
                policy=policy,
                clients=options.clients,
                seed=options.seed,
                ranks=options.ranks,
                stores=started.enter_context(SharedStores()) if options.stores else None,
                say=say,
            )
            report = campaign.run(60 * options.minutes, restart=True)
    report.write(options.out)
    print(_table(report))
    print(f"{'All of this holds' if report.passed else 'NOT all of this holds'}; see {options.out}")
    return 0 if report.passed else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m integration.campaign", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of load (default 10)")
    parser.add_argument("--engine", choices=list(ENGINES), default="vllm")
    policies = {name: list(engine.policies) for name, engine in ENGINES.items()}
    known = "; ".join(f"{name}: {', '.join(each)}" for name, each in policies.items())
    parser.add_argument("--policy", help=f"what failed loads mean ({known}); default: the first")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1, help="decides what is asked and breaks")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ones (default 1)")
    parser.add_argument(
        "--stores", action="store_true", help="Mooncake Store and a bucket below the disk"
    )
    parser.add_argument("--out", type=Path, default=Path("campaign.json"))
    parser.add_argument("--folder", type=Path, help="keep logs and files there")
    options = parser.parse_args()
    allowed = policies[options.engine]
    if options.policy not in {None, *allowed}:
        parser.error(
            f"--policy is {options.policy!r}; allowed with --engine {options.engine}: "
            f"{', '.join(allowed)}"
        )
    return options


def _table(report: Report) -> str:
    seen = report.as_dict()
    lines = [f"requests: {seen['requests']}"]
    lines += [f"{name}: {count}" for name, count in seen["faults"].items()]
    lines += [
        f"{'ok  ' if check.held else 'FAIL'} {check.what} ({check.seen})" for check in report.checks
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    interrupt_at_sigterm()
    sys.exit(main())
