# SPDX-License-Identifier: Apache-2.0
"""What a campaign leaves behind."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from integration.campaign.clients import Outcome, Request
from integration.campaign.faults import Hit, Kind
from integration.campaign.verdict import Check

ENGINE_LIVES = "the engine lives"


@dataclass(slots=True)
class Report:
    """What came out; `as_dict` is what is written."""

    policy: str
    seed: int
    seconds: float
    requests: list[Request] = field(default_factory=list)
    given: Counter[Kind] = field(default_factory=Counter)
    hits: list[Hit] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    taken_out: int = 0
    log: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.held for check in self.checks)

    @property
    def engine_lives(self) -> bool:
        """Whether it did at the end of the load."""
        return all(check.held for check in self.checks if check.what == ENGINE_LIVES)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def as_dict(self) -> dict[str, Any]:
        outcomes = Counter(request.outcome for request in self.requests)
        hits = Counter(hit.kind for hit in self.hits)
        return {
            "policy": self.policy,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "passed": self.passed,
            "requests": {outcome.name.lower(): outcomes[outcome] for outcome in Outcome},
            "faults": {
                kind.name.lower(): {"ordered": self.given[kind], "hits": hits[kind]}
                for kind in Kind
                if self.given[kind]
            },
            "checks": [asdict(check) for check in self.checks],
            "failed_requests": sorted(
                {request.detail for request in self.requests if request.outcome is Outcome.FAILED}
            )[:10],
            "taken_out": self.taken_out,
            "counters": self.counters,
            "log": self.log,
        }
