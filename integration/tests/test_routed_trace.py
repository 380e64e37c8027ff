# SPDX-License-Identifier: Apache-2.0
"""Dynamo's router sends returning prompts to the worker whose lower tiers have them."""

from __future__ import annotations

import random

from integration.clients import environment
from integration.clients.routed_trace import CASES, Request, replay

CONVERSATIONS = 24
BLOCKS = 12
TURNS = 4


def conversations() -> list[Request]:
    """Conversations take turns, a second apart, and come back after all others."""
    rng = random.Random(3)
    made = []
    for turn in range(TURNS):
        order = rng.sample(range(CONVERSATIONS), CONVERSATIONS)
        for place, number in enumerate(order):
            blocks = range(1000 * number, 1000 * number + BLOCKS + turn)
            seconds = float(turn * CONVERSATIONS + place)
            made.append(Request(seconds, blocks, 512 * len(blocks) + 1, 50))
    return made


def test_events_of_lower_tiers_bring_prompts_home() -> None:
    environment.python()  # else the test is skipped
    requests = conversations()
    # A worker's own cache has room for one conversation, its host memory for all.
    told, untold = (replay(requests, weights, (16, 400, 400), 4) for weights in CASES.values())
    assert told.wrong == untold.wrong == 0, "the router knows what each worker has"
    assert told.returning == untold.returning == (TURNS - 1) * CONVERSATIONS
    assert told.hits > 1.5 * untold.hits
    assert told.found > untold.found
