# SPDX-License-Identifier: Apache-2.0
"""Two engines share blocks by Mooncake Store, and live on without each other and without it."""

from __future__ import annotations

import pytest

pytest.importorskip(
    "mooncake.store",
    reason="Mooncake Store is not installed: pip install 'flexkv[mooncake]', apt-get install "
    "libibverbs1 librdmacm1 libnuma1",
    exc_type=ImportError,
)

from integration.harness.engine import Engine
from integration.harness.mooncake_master import MooncakeMaster
from integration.tests.corpus import ABORTED, CONCURRENT, EVICTED, FLEXKV_BLOCK, LONG, WARM
from integration.tests.disks import restorable, restored
from integration.tests.nodes import (
    Nodes,
    await_sharing,
    hits_by_tier,
    store,
    submit_all,
)
from integration.tests.reference import Reference
from integration.tests.steps import ask_each

FIRST = ABORTED[:2] + WARM
SEGMENT_GB = 1 / 16


def test_a_node_hits_what_another_computed_and_outlives_it(
    nodes: Nodes, reference: Reference
) -> None:
    with MooncakeMaster(segment_gb=SEGMENT_GB) as master:

        def held() -> int:
            return master.metric("key_count")

        one = nodes.start(**master.settings)
        reference.check_all(FIRST, store(one, FIRST, held), what="the first node")
        store(one, EVICTED, held)
        # The other node lends no memory: every byte that it finds is in memory of the first one.
        other = nodes.start(**master.settings | {"mooncake_segment_gb": 0})
        asked = master.metric("batch_get_replica_list_items_total")
        found = ask_each(other, FIRST)
        reference.check_all(FIRST, found, what="the other node")
        assert restored(found) == restorable(FIRST)
        assert hits_by_tier(other) == {"mooncake": sum(restorable(FIRST))}
        assert hits_by_tier(one) == {}
        got = master.metric("batch_get_replica_list_items_total") - asked
        assert got == sum(restorable(FIRST)) // FLEXKV_BLOCK

        _lose_the_master(master, other, reference)
        answers = await_sharing(one, other, LONG[0])
        reference.check_all([LONG[0]] * len(answers), answers, what="with the master back")

        store(one, EVICTED, held, cache_salt="again")
        waiting = submit_all(other, EVICTED, cache_salt="again")
        one.kill()
        reference.check_all(EVICTED, [each.result() for each in waiting], what="as a node dies")
        reference.check_all(WARM, ask_each(other, WARM), what="after the node's death")


def test_without_a_metadata_server(nodes: Nodes, reference: Reference) -> None:
    with MooncakeMaster(metadata=False) as master:
        one, other = (nodes.start(**master.settings) for _ in range(2))
        cold = store(one, WARM, lambda: master.metric("key_count"))
        reference.check_all(WARM, cold, what="cold")
        found = ask_each(other, WARM)
        reference.check_all(WARM, found, what="from Mooncake")
        assert restored(found) == restorable(WARM)
        assert hits_by_tier(other) == {"mooncake": sum(restorable(WARM))}


def _lose_the_master(master: MooncakeMaster, engine: Engine, reference: Reference) -> None:
    """The master hangs, dies and comes back empty, always with requests under way."""
    prompts = EVICTED[:6] + CONCURRENT[:8], EVICTED[6:] + CONCURRENT[8:]
    for part, fault in zip(prompts, (master.pause, master.kill), strict=True):
        waiting = submit_all(engine, part)
        fault()
        answers = [each.result() for each in waiting]
        reference.check_all(part, answers, what=f"master: {fault.__name__}")
        master.go_on()
    master.restart()
