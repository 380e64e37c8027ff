# SPDX-License-Identifier: Apache-2.0
"""Two ranks: each block on disk holds the heads of both, and the next engine restores them, also
with another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from integration.harness.config import EngineConfig
from integration.harness.engine import Engine
from integration.harness.host import EngineHost
from integration.tests import disks
from integration.tests.corpus import ABORTED, ENGINE_BLOCK, EVICTED, FLEXKV_BLOCK
from integration.tests.disks import ask_and_settle, restorable, restored
from integration.tests.reference import Reference
from integration.tests.steps import ask_each, blocks_of, external_hits, whole_blocks

WRITTEN_BY_ONE = ABORTED[:3]
"""More than host memory holds."""
TEXTS = WRITTEN_BY_ONE + EVICTED[:4]


def test_restarts_with_another_number_of_ranks(
    host: EngineHost,
    reference: Reference,
    disk_config: Callable[..., EngineConfig],
    work_dir: Path,
) -> None:
    """One rank, two, and one again; those in the middle are killed."""
    directory = work_dir / "disk of one rank and of two"
    one, two = disk_config(directory), disk_config(directory, tensor_parallel_size=2)

    engine = host.start(one)
    ask_and_settle(engine, WRITTEN_BY_ONE)

    engine = host.start(two)
    answers = ask_and_settle(engine, TEXTS)
    reference.check_all(TEXTS, answers, what="two ranks over what one wrote")
    assert restored(answers[: len(WRITTEN_BY_ONE)]) == restorable(WRITTEN_BY_ONE)
    written = _shards(engine)
    assert written[0] != written[1]
    engine.forget()
    ask_and_settle(engine, WRITTEN_BY_ONE)
    engine.forget()
    hits = external_hits(engine)
    assert _shards(engine) == written
    assert external_hits(engine) - hits == whole_blocks(len(TEXTS[-1]))
    owner = disks.run_cli("stat", str(directory))[1]["folders"][0]["owner"]
    assert owner in engine.pids()
    disks.settle(engine)
    engine.kill()

    engine = host.start(one)
    answers = ask_each(engine, TEXTS)
    reference.check_all(TEXTS, answers, what="one rank over what two wrote")
    assert restored(answers) == restorable(TEXTS)

    host.close()
    code, checked = disks.run_cli("verify", str(directory))
    assert (code, checked["bad"]) == (0, [])
    code, stat = disks.run_cli("stat", str(directory))
    assert code == 0
    (folder,) = stat["folders"]
    assert folder["owner"] is None
    assert folder["hit_blocks"] >= sum(restorable(WRITTEN_BY_ONE)) // FLEXKV_BLOCK
    assert folder["damaged_blocks"] == 0
    assert folder["used_slots"] == checked["folders"][0]["blocks"] > 0


def _shards(engine: Engine) -> list[list[str]]:
    """Digests of the engine blocks of the last prompt that FlexKV keeps, of each rank."""
    prompt = TEXTS[-1]
    blocks = blocks_of(engine, prompt)[: whole_blocks(len(prompt)) // ENGINE_BLOCK]
    digests: list[list[str]] = engine.rpc("keeps_weights_digests", blocks)
    return digests
