# SPDX-License-Identifier: Apache-2.0
"""One campaign: a server, its clients, what goes wrong meanwhile, and what was seen of it."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from integration.campaign import damage
from integration.campaign.clients import LIMIT_SECONDS, Clients, Outcome, Request, ask
from integration.campaign.counts import Counts
from integration.campaign.engine import DISK, ORDERS, Engine, Server
from integration.campaign.faults import IN_ENGINE, Kind, OrderBook
from integration.campaign.injector import Injector
from integration.campaign.prompts import Question
from integration.campaign.report import ENGINE_LIVES, Report
from integration.campaign.stores import (
    SharedStores,
    check_stores,
    closed,
    damaged_blocks,
    hit_tokens,
)
from integration.campaign.verdict import Check, check_requests
from integration.harness.answers import EngineError

Say = Callable[[str], None]

_PROGRESS_SECONDS = 5.0
_QUIET_SECONDS = 300.0
_ALWAYS = 1 << 30
_CLEAN = 8
"""Questions at the end, when nothing is wrong any more."""


class Campaign:
    """See the module.

    Args:
        engine: that is put to the test.
        folder: receives the checkpoint, logs, and the disk tier.
        questions: its `reference`.
        policy: one of its policies.
        clients: how many ask at once.
        seed: decides what is asked and what goes wrong.
        ranks: tensor-parallel ones of the engine; copies fail on the last one.
        stores: below the disk, whose faults come, too; the caller ends them. Or none.
        say: tells the user.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        questions: Sequence[Question],
        *,
        policy: str,
        clients: int,
        seed: int,
        say: Say,
        ranks: int = 1,
        stores: SharedStores | None = None,
    ) -> None:
        self._folder = folder / policy
        self._root = self._folder / DISK
        self._engine = engine
        self._policy = policy
        self._ranks = ranks
        self._stores = stores
        self._kinds = (*engine.kinds, *(stores.kinds if stores else ()))
        self._questions = questions
        self._clients = clients
        self._seed = seed
        self._say = say
        self._book = OrderBook(self._folder / ORDERS)
        self._start_server = engine.starter(folder, self._folder, policy, ranks, stores)
        self._report = Report(policy, seed, 0.0)

    def run(self, seconds: float, *, restart: bool) -> Report:
        """Load for so long, then the checks; `restart` adds those of a second start."""
        report = self._report
        with self._start_server(self._folder / "server.log") as server:
            try:
                self._load(server, seconds)
                report.checks.append(self._all_loads_fail(server))
                report.hits = self._book.hits()
                report.checks += self._after_the_load(server)
            except (EngineError, OSError) as error:
                report.checks.append(Check(ENGINE_LIVES, False, repr(error)))
            report.log = self._telling_lines(server)
        if restart and report.engine_lives:
            report.checks += self._after_restarts()
        return report

    def _load(self, server: Server, seconds: float) -> None:
        report, book = self._report, self._book
        begun = time.monotonic()
        clients = Clients(
            server.address, self._engine.wire, self._questions, self._seed, self._clients
        )
        told = begun

        def pause(duration: float) -> None:
            nonlocal told
            time.sleep(duration)
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                self._say(_progress(told - begun, clients.requests(), book))

        try:
            injector = Injector(
                server,
                book,
                self._root,
                self._engine.block_bytes,
                kinds=self._kinds,
                stores=self._stores,
                seed=self._seed,
                pause=pause,
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
            self._ask(server, number)
        server.forget()
        self._book.give(Kind.LOAD_FAILED, _ALWAYS, 10 * LIMIT_SECONDS)
        asked: list[Request] = []
        for number in numbers:
            asked.append(self._ask(server, number))
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
        clean = [self._ask(server, i) for i in range(_CLEAN)]
        server.forget()
        clean += [self._ask(server, i) for i in range(_CLEAN)]
        counts = self._settled(server)
        report.counters = counts.flexkv()
        report.taken_out = counts.total(self._engine.taken_out)
        brought = counts.hit_tokens() - before.hit_tokens()
        return [
            *check_requests(self._engine.policies[self._policy], report.requests, report.hits),
            Check(ENGINE_LIVES, server.alive, ""),
            self._all_met(),
            *self._of_stores(server),
            _all_right("clean requests at the end are right", clean),
            Check("FlexKV still brings blocks", brought > 0, f"{brought} tokens"),
            *self._engine.check(counts, report.given, report.hits, self._policy, self._ranks),
            self._notices_wrong_bytes(server),
        ]

    def _of_stores(self, server: Server) -> Iterator[Check]:
        """Each store brought blocks, all of them are used again, and no wrong byte of theirs is."""
        if self._stores is None:
            return
        late = time.monotonic() + _QUIET_SECONDS
        while not (back := closed(self._settled(server))) and time.monotonic() < late:
            # Only who asks and writes notices that a store is back.
            yield self._all_are_right(server, "with the stores back")
        yield Check("all stores are used again", back, "")
        # Whatever the disk has no room for comes from the stores. Where computing is as fast,
        # FlexKV waits for a store only now and then, to measure it again.
        while not all((hits := hit_tokens(self._settled(server))).values()):
            if time.monotonic() > late:
                break
            if not hits["objects"]:
                self._stores.empty_mooncake()
            yield self._all_are_right(server, "while a store has brought nothing")
        self._stores.damage_all()
        yield self._all_are_right(server, "with all objects damaged")
        while not all(damaged_blocks(counts := self._settled(server)).values()):
            if time.monotonic() > late:
                break
            # What was found damaged was removed, and written anew.
            self._stores.damage_all()
            yield self._all_are_right(server, "with all objects damaged again")
        yield from check_stores(counts)

    def _notices_wrong_bytes(self, server: Server) -> Check:
        """A load that brings wrong bytes and does not say so must show, or nothing above counts."""
        what = "wrong bytes would be noticed"
        number = max(range(_CLEAN), key=lambda i: len(self._questions[i].prompt))
        # Blocks that are computed behind wrong bytes would be cached under their right names.
        if not self._comes_from_host_memory(server, number):
            return Check(what, False, f"question {number} does not come from host memory")
        server.forget()
        self._book.give(Kind.LOAD_WRONG, _ALWAYS, LIMIT_SECONDS)
        wrong = self._ask(server, number)
        self._book.withdraw()
        server.forget()
        right = self._ask(server, number)
        return Check(
            what,
            (wrong.outcome, right.outcome) == (Outcome.WRONG, Outcome.RIGHT),
            f"{wrong.outcome.name}, then {right.outcome.name}",
        )

    def _comes_from_host_memory(self, server: Server, number: int) -> bool:
        """Ask a question until host memory brings all that a prompt can have."""
        step = self._engine.hit_tokens
        whole = (len(self._questions[number].prompt) - 1) // step * step
        late = time.monotonic() + _QUIET_SECONDS
        brought = 0
        before = _from_host_memory(self._settled(server))
        while brought < whole and time.monotonic() < late:
            server.forget()
            self._ask(server, number)
            now = _from_host_memory(self._settled(server))
            before, brought = now, now - before
        return brought >= whole

    def _after_restarts(self) -> list[Check]:
        """After a reset nothing on disk outlives its engine, so the second start fills the disk
        anew. Its files are damaged once more then, and the third start finds them so."""
        checks = []
        with self._start("second") as server:
            checks.append(self._all_are_right(server, "after a restart"))
            self._settled(server)
            files = damage.find_open_files(self._root, server.group, self._engine.block_bytes)
            for kind in sorted(damage.AT_ONCE):
                files.damage(kind, random.Random(self._seed))
        with self._start("third") as server:
            # What was asked for last first: in the old order each would push out what comes next.
            checks.append(self._all_are_right(server, "on damaged files", step=-1))
            brought = self._settled(server).value("flexkv_hit_tokens_total", tier="disk")
            found = brought > 0 or self._engine.blocks_of_hit > 1
            checks.append(Check("what is whole on disk is found", found, f"{brought} tokens"))
            damage.remove(self._root)
            server.forget()
            checks.append(self._all_are_right(server, "without the directory"))
            checks.append(Check("the restarted engine lives", server.alive, ""))
        return checks

    def _start(self, name: str) -> Server:
        self._say(f"the {name} start, on what is left on disk")
        return self._start_server(self._folder / f"{name}.log")

    def _ask(self, server: Server, number: int) -> Request:
        return ask(server.address, self._engine.wire, number, self._questions[number])

    def _all_are_right(self, server: Server, when: str, step: int = 1) -> Check:
        numbers = range(len(self._questions))[::step]
        asked = [self._ask(server, i) for i in numbers]
        return _all_right(f"all answers are right {when}", asked)

    def _settled(self, server: Server) -> Counts:
        """Its counts, once nothing is under way. An idle engine tells with its next step."""
        deadline = time.monotonic() + _QUIET_SECONDS
        before = None
        while time.monotonic() < deadline:
            server.step()
            time.sleep(0.5)
            counts = Counts(server.metrics(), self._engine.prefix)
            now = counts.flexkv()
            now = {name: v for name, v in now.items() if not name.startswith("query_tokens")}
            if now == before and not any(v for k, v in now.items() if k.startswith("queue")):
                return counts
            before = now
        raise EngineError(f"copies did not end within {_QUIET_SECONDS:.0f} s: {before}")

    def _all_met(self) -> Check:
        """Whether each kind came, and those inside the engine also happened."""
        met = {hit.kind for hit in self._report.hits} | (self._report.given.keys() - IN_ENGINE)
        missing = [kind.name for kind in self._kinds if kind not in met]
        return Check("each kind of fault happened", not missing, ", ".join(missing))

    def _telling_lines(self, server: Server) -> list[str]:
        """What FlexKV warned of, each once."""
        lines = self._engine.warnings(server.log())
        return sorted({re.sub(r"\d+", "N", line) for line in lines})


def _from_host_memory(counts: Counts) -> int:
    return counts.value("flexkv_hit_tokens_total", tier="host")


def _all_right(what: str, requests: Sequence[Request]) -> Check:
    others = [request for request in requests if request.outcome is not Outcome.RIGHT]
    return Check(what, not others, f"{len(requests)}; " + "; ".join(map(str, others[:3])))


def _progress(seconds: float, requests: Sequence[Request], book: OrderBook) -> str:
    outcomes = Counter(request.outcome for request in requests)
    said = ", ".join(f"{outcomes[each]} {each.name.lower()}" for each in Outcome if outcomes[each])
    return f"{seconds:4.0f} s: {said}; {book.given.total()} faults, {len(book.hits())} hits"
