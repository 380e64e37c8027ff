# SPDX-License-Identifier: Apache-2.0
"""The words for FlexKV's own health: how well a cache works, and what keeps it from more."""

from __future__ import annotations

import enum
from typing import NamedTuple


class HealthState(enum.StrEnum):
    """How well a cache works, the best first. The values are labels of metrics."""

    OK = "ok"
    """It does all that the settings ask for."""
    DEGRADED = "degraded"
    """It serves hits, but not from everywhere, or it stores less than it could."""
    OFF = "off"
    """It finds, loads and stores nothing. The engine computes everything."""


class Trouble(enum.StrEnum):
    """Why a cache is not `OK`. The values are labels of metrics."""

    READS = "reads"
    WRITES = "writes"
    RECOVERING = "recovering"
    SERVICE = "service"
    POOL = "pool"
    SUSPENDED = "suspended"
    STOPPED = "stopped"
    LOST_TRACK = "lost_track"
    SETTING = "setting"

    @property
    def state(self) -> HealthState:
        """The state of a cache that has this trouble."""
        return _STATES[self]

    @property
    def of_tier(self) -> bool:
        """Whether a lower tier has it, and not the cache as a whole."""
        return self in (Trouble.READS, Trouble.WRITES)


_STATES = {
    **dict.fromkeys(Trouble, HealthState.OFF),
    Trouble.READS: HealthState.DEGRADED,
    Trouble.WRITES: HealthState.DEGRADED,
    Trouble.RECOVERING: HealthState.DEGRADED,
    Trouble.SERVICE: HealthState.DEGRADED,
    Trouble.POOL: HealthState.DEGRADED,
}

_TEXTS = {
    Trouble.READS: "circuit of {tier} open: no reads until the tier works again",
    Trouble.WRITES: "circuit of {tier} open: no writes until the tier works again",
    Trouble.RECOVERING: "an error may have lost a copy: no stores or fetches until all have ended",
    Trouble.SERVICE: "the service does not answer: loads from host memory only, until it is back",
    Trouble.POOL: "a clear of the service's pool failed: host memory only, until one succeeds",
    Trouble.SUSPENDED: "a reset failed: nothing is loaded or stored until one succeeds",
    Trouble.STOPPED: "copies failed for good: see the engine's log, and restart the engine",
    Trouble.LOST_TRACK: "an error left copies unknown: see the engine's log, and restart it",
    Trouble.SETTING: "the setting enable (ENABLE_FLEXKV) is False",
}


class Problem(NamedTuple):
    """One trouble of a lower tier; of the cache as a whole if the tier's name is empty."""

    trouble: Trouble
    tier: str = ""

    @property
    def text(self) -> str:
        """For people: what does not work, until when."""
        return _TEXTS[self.trouble].format(tier=self.tier)
