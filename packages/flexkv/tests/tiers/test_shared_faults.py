# SPDX-License-Identifier: Apache-2.0
"""Nodes and stores over a network that delays and drops packets, beside peers that hang or die, and
with a clock that jumps. A node that finds wrong bytes says so, and fails the test."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "mooncake.store",
    reason="Mooncake Store is not installed: pip install 'flexkv[mooncake]', apt-get install "
    "libibverbs1 librdmacm1 libnuma1",
    exc_type=ImportError,
)

from jumping_clock import JumpingClock
from shared_node import Remote, await_sharing, texts

from integration.harness import bad_network
from integration.harness.bad_network import BadNetwork
from integration.harness.mooncake_master import MooncakeMaster
from packages.conftest import PATIENCE_SECONDS

DEADLINES = {"mooncake_question_seconds": 0.25, "mooncake_timeout_seconds": 0.5}
Start = Callable[..., Remote]


@pytest.fixture
def start(at_end: ExitStack) -> Start:
    def make(*arguments: Any) -> Remote:
        node = at_end.enter_context(closing(Remote(*arguments)))
        at_end.callback(node.process.send_signal, signal.SIGCONT)
        return node

    return make


@pytest.mark.skipif(bad_network.possible() is not None, reason=str(bad_network.possible()))
def test_a_bad_network_costs_hits_and_nothing_else(start: Start) -> None:
    with BadNetwork() as network, MooncakeMaster(bad_network.FAR, network.far) as master:
        settings = master.settings | DEADLINES
        one = start(settings, {}, network.far)
        other = start(settings | {"mooncake_segment_gb": 0}, {}, network.near)
        fresh = texts()
        await_sharing(one, other, fresh)

        network.set(delay=0.25)
        late = time.monotonic() + PATIENCE_SECONDS
        while other.do("state") == "closed":
            assert time.monotonic() < late
            one.do("store", text := next(fresh))
            assert text.startswith(other.do("fetch", text))

        network.set(loss=0.3)
        for text in itertools.islice(fresh, 5):
            one.do("store", text)
            assert text.startswith(other.do("fetch", text))

        network.set()
        await_sharing(one, other, fresh)
        assert other.do("state") == "closed"


def test_a_peer_that_hangs_or_dies_costs_hits_and_nothing_else(start: Start) -> None:
    with MooncakeMaster() as master:
        settings = master.settings | DEADLINES | {"mooncake_question_seconds": PATIENCE_SECONDS}
        one = start(settings, {})
        other = start(settings | {"mooncake_segment_gb": 0}, {})
        fresh = texts()
        await_sharing(one, other, fresh)
        known = [next(fresh) for _ in range(2)]
        for text in known:
            one.do("store", text)

        one.process.send_signal(signal.SIGSTOP)
        assert other.do("fetch", known[0]) == ""
        one.process.send_signal(signal.SIGCONT)
        await_sharing(one, other, fresh)

        one.kill()
        assert other.do("fetch", known[1]) == ""
        third = start(settings, {})
        await_sharing(third, other, fresh)


def test_a_clock_that_jumps_changes_nothing(start: Start, tmp_path: Path) -> None:
    clock = JumpingClock(tmp_path)
    with MooncakeMaster() as master:
        patience = dict.fromkeys(DEADLINES, PATIENCE_SECONDS)
        settings = master.settings | patience
        one, other = start(settings, clock.environ), start(settings, clock.environ)
        fresh = texts()
        await_sharing(one, other, fresh)
        for seconds in (86400, -86400, 0):
            before = float(one.do("clock"))
            clock.set(seconds)
            assert abs(float(one.do("clock")) - before) > 80000, "the clock has not jumped"
            text = next(fresh)
            one.do("store", text)
            assert other.do("fetch", text) == text
