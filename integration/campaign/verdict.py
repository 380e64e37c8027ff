# SPDX-License-Identifier: Apache-2.0
"""What a campaign must have shown."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from integration.campaign.clients import Outcome, Request
from integration.campaign.faults import LOAD_FAILURES, Hit

_HEARD_SECONDS = 5.0
"""Within which a server has heard that a client hung up: its engine may begin the request's load
until then."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold, and what was seen."""

    what: str
    held: bool
    seen: str


class OnFailedLoad(enum.Enum):
    """What an engine does about requests whose loads fail."""

    COMPUTES = "it computes what was not loaded"
    FAILS_ONE = "each load that fails ends its request"
    FAILS_BATCH = "a load that fails ends all requests of its batch that load"


def check_requests(
    on_failure: OnFailedLoad, requests: Sequence[Request], hits: Sequence[Hit]
) -> Iterable[Check]:
    """No wrong token, no hang, and no error but where a load failed that the engine minds."""
    by_outcome = Counter(request.outcome for request in requests)
    wrong = [request for request in requests if request.outcome is Outcome.WRONG]
    yield Check("no request got a wrong token", not wrong, "; ".join(map(str, wrong[:3])))
    yield Check("no request hung", not by_outcome[Outcome.HUNG], str(by_outcome[Outcome.HUNG]))
    failed = [request for request in requests if request.outcome is Outcome.FAILED]
    if on_failure is OnFailedLoad.COMPUTES:
        yield Check("no request failed", not failed, "; ".join(map(str, failed[:3])))
        return
    failures = [hit for hit in hits if hit.kind in LOAD_FAILURES]
    pair = match if on_failure is OnFailedLoad.FAILS_ONE else meet
    unexplained, _ = pair(failed, failures)
    yield Check(
        "a request failed only if its load did",
        not unexplained,
        f"{len(failed)} failed, {len(failures)} loads: {'; '.join(map(str, unexplained[:3]))}",
    )
    ended = [
        replace(request, ended=request.ended + _HEARD_SECONDS)
        for request in requests
        if request.outcome is Outcome.ABORTED
    ]
    _, unanswered = pair([*failed, *ended], failures)
    yield Check(
        "a request whose load failed got no answer",
        not unanswered,
        "; ".join(map(str, unanswered[:3])),
    )


def meet(requests: Iterable[Request], hits: Iterable[Hit]) -> tuple[list[Request], list[Hit]]:
    """The requests during which no hit was, and the hits that were during no request."""
    asked, done = list(requests), list(hits)

    def during(hit: Hit, request: Request) -> bool:
        return request.begun <= hit.time <= request.ended

    return (
        [request for request in asked if not any(during(hit, request) for hit in done)],
        [hit for hit in done if not any(during(hit, request) for request in asked)],
    )


def match(requests: Iterable[Request], hits: Iterable[Hit]) -> tuple[list[Request], list[Hit]]:
    """Pair as many requests as possible with a hit each, that was while the request ran.

    Returns the requests and the hits that are left.
    """
    left = sorted(requests, key=lambda request: request.ended)
    unused = []
    for hit in sorted(hits, key=lambda hit: hit.time):
        # Of those that it can belong to, the one that has the fewest hits still to come.
        found = next((each for each in left if each.begun <= hit.time <= each.ended), None)
        if found is None:
            unused.append(hit)
        else:
            left.remove(found)
    return left, unused
