# SPDX-License-Identifier: Apache-2.0
"""One campaign: a server, its clients, what goes wrong meanwhile, and what was seen of it."""

from __future__ import annotations

import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from integration.campaign import damage, setup
from integration.campaign.clients import LIMIT_SECONDS, Clients, Outcome, Request, ask
from integration.campaign.counts import Counts
from integration.campaign.faults import DRAWN, IN_ENGINE, Hit, Kind, OrderBook
from integration.campaign.injector import Injector
from integration.campaign.prompts import Question
from integration.campaign.report import ENGINE_LIVES, Report
from integration.campaign.verdict import Check, check_counters, check_requests
from integration.harness.answers import EngineError
from integration.harness.server import Server

Say = Callable[[str], None]

_PROGRESS_SECONDS = 5.0
_QUIET_SECONDS = 300.0
_ALWAYS = 1 << 30
_CLEAN = 8
"""Questions at the end, when nothing is wrong any more."""


class Campaign:
    """See the module.

    Args:
        folder: receives the checkpoint, logs, and the disk tier.
        questions: from `setup.reference`.
        policy: vLLM's `kv_load_failure_policy`.
        clients: how many ask at once.
        seed: decides what is asked and what goes wrong.
        ranks: tensor-parallel ones of the engine; copies fail on the last one.
        say: tells the user.
    """

    def __init__(
        self,
        folder: Path,
        questions: Sequence[Question],
        *,
        policy: str,
        clients: int,
        seed: int,
        say: Say,
        ranks: int = 1,
    ) -> None:
        self._folder = folder / policy
        self._root = self._folder / setup.DISK
        self._questions = questions
        self._clients = clients
        self._seed = seed
        self._say = say
        self._book = OrderBook(self._folder / setup.ORDERS)
        self._config = setup.campaign_config(folder, self._folder, policy, ranks)
        self._sizes = setup.sizes(ranks)
        self._report = Report(policy, seed, 0.0)

    def run(self, seconds: float, *, restart: bool) -> Report:
        """Load for so long, then the checks; `restart` adds those of a second start."""
        report = self._report
        with Server(self._config, self._folder / "server.log", None) as server:
            try:
                self._load(server, seconds)
                report.checks.append(self._all_loads_fail(server))
                report.hits = self._book.hits()
                report.checks += self._after_the_load(server)
            except (EngineError, OSError) as error:
                report.checks.append(Check(ENGINE_LIVES, False, repr(error)))
            report.log = _telling_lines(server.log())
        if restart and report.engine_lives:
            report.checks += self._after_restarts()
        return report

    def _load(self, server: Server, seconds: float) -> None:
        report, book = self._report, self._book
        begun = time.monotonic()
        clients = Clients(server.address, self._questions, self._seed, self._clients)
        told = begun

        def pause(duration: float) -> None:
            nonlocal told
            time.sleep(duration)
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                self._say(_progress(told - begun, clients.requests(), book))

        try:
            injector = Injector(
                server, book, self._root, setup.BLOCK_BYTES, seed=self._seed, pause=pause
            )
            injector.run(seconds)
        finally:
            book.withdraw()
            report.requests = clients.stop()
            report.seconds = time.monotonic() - begun
            report.given = Counter(book.given)

    def _all_loads_fail(self, server: Server) -> Check:
        """With a rank that can never load, requests are computed, or told so: none tries for
        ever."""
        numbers = range(_CLEAN)
        for number in numbers:
            ask(server.address, number, self._questions[number])
        server.reset_prefix_cache(external=False)
        self._book.give(Kind.LOAD_FAILED, _ALWAYS, 10 * LIMIT_SECONDS)
        asked: list[Request] = []
        for number in numbers:
            asked.append(ask(server.address, number, self._questions[number]))
            if asked[-1].outcome is Outcome.HUNG:
                break  # so would the others
        self._book.withdraw()
        self._report.requests += asked
        seen = [request.outcome for request in asked]
        return Check(
            "requests end though every load fails",
            {Outcome.RIGHT, Outcome.FAILED}.issuperset(seen),
            ", ".join(outcome.name for outcome in seen),
        )

    def _after_the_load(self, server: Server) -> list[Check]:
        report = self._report
        before = self._settled(server)
        clean = [ask(server.address, i, self._questions[i]) for i in range(_CLEAN)]
        server.reset_prefix_cache(external=False)
        clean += [ask(server.address, i, self._questions[i]) for i in range(_CLEAN)]
        counts = self._settled(server)
        report.counters = counts.flexkv()
        report.preemptions = counts.value("num_preemptions_total")
        hits = "external_prefix_cache_hits_total"
        brought = counts.value(hits) - before.value(hits)
        return [
            *check_requests(report.policy, report.requests, report.hits),
            Check(ENGINE_LIVES, server.alive, ""),
            _all_met(report.given, report.hits),
            _all_right("clean requests at the end are right", clean),
            Check("FlexKV still brings blocks", brought > 0, f"{brought} tokens"),
            *check_counters(counts, report.given, report.hits, report.policy, self._sizes),
            self._notices_wrong_bytes(server),
        ]

    def _notices_wrong_bytes(self, server: Server) -> Check:
        """A load that brings wrong bytes and does not say so must show, or nothing above counts."""
        number = max(range(_CLEAN), key=lambda i: len(self._questions[i].prompt))
        ask(server.address, number, self._questions[number])
        server.reset_prefix_cache(external=False)
        self._book.give(Kind.LOAD_WRONG, _ALWAYS, LIMIT_SECONDS)
        wrong = ask(server.address, number, self._questions[number])
        self._book.withdraw()
        server.reset_prefix_cache(external=False)
        right = ask(server.address, number, self._questions[number])
        return Check(
            "wrong bytes would be noticed",
            (wrong.outcome, right.outcome) == (Outcome.WRONG, Outcome.RIGHT),
            f"{wrong.outcome.name}, then {right.outcome.name}",
        )

    def _after_restarts(self) -> list[Check]:
        """After a reset nothing on disk outlives its engine, so the second start fills the disk
        anew. Its files are damaged once more then, and the third start finds them so."""
        checks = []
        with self._start("second") as server:
            checks.append(self._all_are_right(server, "after a restart"))
            self._settled(server)
            files = damage.find_open_files(self._root, server.session, setup.BLOCK_BYTES)
            for kind in sorted(damage.AT_ONCE):
                files.damage(kind, random.Random(self._seed))
        with self._start("third") as server:
            # What was asked for last first: in the old order each would push out what comes next.
            checks.append(self._all_are_right(server, "on damaged files", step=-1))
            brought = self._settled(server).value("flexkv_hit_tokens_total", tier="disk")
            checks.append(Check("what is whole on disk is found", brought > 0, f"{brought} tokens"))
            shutil.rmtree(self._root)
            server.reset_prefix_cache(external=False)
            checks.append(self._all_are_right(server, "without the directory"))
            checks.append(Check("the restarted engine lives", server.alive, ""))
        return checks

    def _start(self, name: str) -> Server:
        self._say(f"the {name} start, on what is left on disk")
        return Server(self._config, self._folder / f"{name}.log", None)

    def _all_are_right(self, server: Server, when: str, step: int = 1) -> Check:
        numbers = range(len(self._questions))[::step]
        asked = [ask(server.address, i, self._questions[i]) for i in numbers]
        return _all_right(f"all answers are right {when}", asked)

    def _settled(self, server: Server) -> Counts:
        """Its counts, once nothing is under way. An idle engine tells with its next step."""
        short = self._questions[0].prompt[: setup.ENGINE_BLOCK // 2]
        deadline = time.monotonic() + _QUIET_SECONDS
        before = None
        while time.monotonic() < deadline:
            server.generate(short)
            time.sleep(0.5)
            counts = Counts(server.metrics())
            now = counts.flexkv()
            now.pop("query_tokens:host"), now.pop("query_tokens:disk")
            if now == before and not any(v for k, v in now.items() if k.startswith("queue")):
                return counts
            before = now
        raise EngineError(f"copies did not end within {_QUIET_SECONDS:.0f} s: {before}")


def _all_right(what: str, requests: Sequence[Request]) -> Check:
    others = [request for request in requests if request.outcome is not Outcome.RIGHT]
    return Check(what, not others, f"{len(requests)}; " + "; ".join(map(str, others[:3])))


def _all_met(given: Counter[Kind], hits: Sequence[Hit]) -> Check:
    """Whether each kind came, and those inside the engine also happened."""
    met = {hit.kind for hit in hits} | (given.keys() - IN_ENGINE)
    missing = [kind.name for kind in DRAWN if kind not in met]
    return Check("each kind of fault happened", not missing, ", ".join(missing))


def _progress(seconds: float, requests: Sequence[Request], book: OrderBook) -> str:
    outcomes = Counter(request.outcome for request in requests)
    said = ", ".join(f"{outcomes[each]} {each.name.lower()}" for each in Outcome if outcomes[each])
    return f"{seconds:4.0f} s: {said}; {book.given.total()} faults, {len(book.hits())} hits"


def _telling_lines(log: str) -> list[str]:
    """What FlexKV warned of, each once."""
    lines = re.findall(r"(?:WARNING|ERROR) .*\[FlexKV\] (.*)", log)
    return sorted({re.sub(r"\d+", "N", line) for line in lines})
