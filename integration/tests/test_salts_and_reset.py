# SPDX-License-Identifier: Apache-2.0
"""Who may see a block: ``cache_salt`` separates users, a reset and new weights forget all."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from integration.harness.checkpoint import TINY, write_checkpoint
from integration.harness.engine import Engine
from integration.tests.corpus import SALTED, WARM
from integration.tests.reference import Reference
from integration.tests.steps import ask, ask_each, whole_blocks


def test_two_salts_share_nothing(engine: Engine, reference: Reference) -> None:
    hit = whole_blocks(len(SALTED))
    for salt, expected in [("a", 0), ("b", 0), (None, 0), ("a", hit), ("b", hit), (None, hit)]:
        answer = ask(engine, SALTED, cache_salt=salt)
        reference.check(SALTED, answer, what=f"salt {salt}")
        assert answer.cached_tokens == expected, f"salt {salt}"
        engine.forget()


def test_a_reset_with_the_connector_leaves_no_hits(engine: Engine, reference: Reference) -> None:
    ask_each(engine, WARM)
    engine.forget()
    assert all(answer.cached_tokens for answer in ask_each(engine, WARM))

    engine.reset_prefix_cache(reset_connector=True)
    answers = ask_each(engine, WARM)
    reference.check_all(WARM, answers, what="after the reset")
    assert [answer.cached_tokens for answer in answers] == [0] * len(WARM)

    engine.forget()
    assert all(answer.cached_tokens for answer in ask_each(engine, WARM))


def test_new_weights_find_no_blocks_of_old_ones(
    engine: Engine, reference: Reference, model: Path, tmp_path: Path
) -> None:
    """Weights are exchanged as vLLM tells users to: its own prefix cache alone is reset."""
    others = write_checkpoint(dataclasses.replace(TINY, name="other", seed=1), tmp_path)
    (before,) = ask_each(engine, WARM[:1])
    for weights in (others, model):
        engine.rpc("reload_weights", None, str(weights))
        engine.forget()
        (computed,) = ask_each(engine, WARM[:1])
        assert computed.cached_tokens == 0
        engine.forget()
        (loaded,) = ask_each(engine, WARM[:1])
        assert loaded.cached_tokens == whole_blocks(len(WARM[0]))
        assert loaded.tokens == computed.tokens
        # Else this would not notice old blocks.
        assert (computed.tokens == before.tokens) == (weights == model)
    reference.check(WARM[0], loaded, what="weights of before")
