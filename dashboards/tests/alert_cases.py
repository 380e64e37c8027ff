# SPDX-License-Identifier: Apache-2.0
"""Series for which each alert fires, and others, as alike as possible, for which it does not.

Values are as promtool writes them: `0+2x60` begins at 0 and adds 2 in each of 60 minutes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Series = dict[str, str]


@dataclass(frozen=True)
class Case:
    """Of one alert.

    Attributes:
        fires: series by name, without the engine's prefix.
        quiet: the same, for which it does not fire.
        at: when it is looked at.
        labels: of the alert beside those of every alert.
    """

    fires: Series
    quiet: Series
    at: str = "30m"
    labels: dict[str, str] = field(default_factory=dict)


def _histogram(name: str, fast: int, slow: int, labels: str = "") -> Series:
    """So many values a minute of at most 0.25 s, and of 2.5 to 5 s."""
    counts = {"0.25": fast, "1.0": fast, "2.5": fast, "5.0": fast + slow, "+Inf": fast + slow}
    return {
        f'{name}_bucket{{{labels}le="{bound}"}}': f"0+{count}x200"
        for bound, count in counts.items()
    }


def _flow(stored: int, evicted: int, hits: int) -> Series:
    """Blocks and tokens a minute in host memory."""
    return {
        'stored_blocks_total{tier="host"}': f"0+{stored}x200",
        'evicted_blocks_total{tier="host"}': f"0+{evicted}x200",
        'hit_tokens_total{tier="host"}': f"0+{hits}x200",
        'query_tokens_total{tier="host"}': "0+1000x200",
    }


CASES: dict[str, Case] = {
    "FlexKVCopiesFail": Case(
        {'failures_total{cause="load",tier="host"}': "0x20 1x20"},
        {'failures_total{cause="read",tier="disk"}': "0x20 1x20"},
        "25m",
        {"cause": "load"},
    ),
    "FlexKVInternalErrors": Case(
        {'failures_total{cause="internal",tier=""}': "0x20 1x20"},
        {'failures_total{cause="internal",tier=""}': "5x60"},
        "25m",
    ),
    "FlexKVIsDisabled": Case(
        {'health{state="off",reason="stopped",tier=""}': "0x20 1x20"},
        {
            # A minute only, an engine whose settings turn FlexKV off, and one that is degraded.
            'health{state="off",reason="stopped",tier=""}': "0x24 1 0x20",
            'health{state="off",reason="setting",tier=""}': "1x60",
            'health{state="degraded",reason="reads",tier="disk"}': "1x60",
        },
        "25m",
        {"reason": "stopped"},
    ),
    "FlexKVCircuitOpen": Case(
        {'circuits{tier="disk",direction="write",state="open"}': "0x20 1x20"},
        {
            # A minute only, and drives that work.
            'circuits{tier="disk",direction="write",state="open"}': "0x24 1 0x20",
            'circuits{tier="disk",direction="read",state="closed"}': "1x60",
            # A store that an engine reaches within a minute of its start.
            'circuits{tier="objects",direction="read",state="connecting"}': "1 0x40",
        },
        "25m",
        {"tier": "disk", "direction": "write"},
    ),
    "FlexKVDamagedBlocks": Case(
        {'failures_total{cause="damaged",tier="disk"}': "0x20 1x40"},
        {'failures_total{cause="damaged",tier="disk"}': "3x60"},
        "50m",
        {"tier": "disk"},
    ),
    "FlexKVTierFails": Case(
        {'failures_total{cause="stalled",tier="objects"}': "0+2x60"},
        {'failures_total{cause="stalled",tier="objects"}': "0+0.5x60"},
        labels={"tier": "objects", "cause": "stalled"},
    ),
    "FlexKVStoreAnswersLate": Case(
        {'late_questions_total{tier="mooncake"}': "0+2x60"},
        {'late_questions_total{tier="mooncake"}': "0+0.5x60"},
        labels={"tier": "mooncake"},
    ),
    "FlexKVLoadsAreSlow": Case(
        _histogram("load_seconds", 97, 3), _histogram("load_seconds", 1000, 1), "40m"
    ),
    "FlexKVFetchesAreSlow": Case(
        _histogram("fetch_seconds", 90, 10, 'tier="disk",'),
        _histogram("fetch_seconds", 98, 2, 'tier="disk",'),
        "40m",
        {"tier": "disk"},
    ),
    "FlexKVHitsAreComputed": Case(
        {
            'skipped_tokens_total{reason="slow"}': "0+60x60",
            'hit_tokens_total{tier="host"}': "0+40x60",
        },
        {
            'skipped_tokens_total{reason="slow"}': "0+40x60",
            'skipped_tokens_total{reason="short"}': "0+500x60",
            'hit_tokens_total{tier="host"}': "0+60x60",
        },
        "40m",
    ),
    "FlexKVSlowWayOfCopying": Case(
        {"fallback_bytes_total": "0+1000x60"},
        {"fallback_bytes_total": "1000x60", 'way_bytes_total{way="dma"}': "0+1000x60"},
    ),
    "FlexKVEvictsBeforeReuse": Case(_flow(100, 100, 5), _flow(100, 100, 100), "150m"),
    "FlexKVHostMemoryIsFull": Case(
        {
            'dropped_blocks_total{tier="host"}': "0+20x100",
            'stored_blocks_total{tier="host"}': "0+100x100",
        },
        {
            'dropped_blocks_total{tier="host"}': "0+5x100",
            'stored_blocks_total{tier="host"}': "0+100x100",
        },
        "80m",
    ),
    "FlexKVWritesAreDropped": Case(
        {
            'dropped_blocks_total{tier="disk"}': "0+60x100",
            'stored_blocks_total{tier="host"}': "0+100x100",
        },
        {
            'dropped_blocks_total{tier="disk"}': "0+40x100",
            'stored_blocks_total{tier="host"}': "0+100x100",
        },
        "80m",
        {"tier": "disk"},
    ),
    "FlexKVPinsAreRefused": Case(
        {"refused_pin_blocks_total": "0x20 3x20"}, {"refused_pin_blocks_total": "3x60"}, "25m"
    ),
    "FlexKVParametersAreIgnored": Case(
        {"ignored_parameters_total": "0x20 1x40"}, {"ignored_parameters_total": "1x60"}, "50m"
    ),
}
