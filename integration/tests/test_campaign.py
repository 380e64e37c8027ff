# SPDX-License-Identifier: Apache-2.0
"""The fault campaign, short: `nox -s campaign` is the long one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.campaign.prompts import Question
from integration.campaign.run import Campaign
from integration.campaign.stores import SharedStores, mooncake_works
from integration.campaign.vllm import Vllm
from integration.harness.host import EngineHost

SECONDS = 10
"""However short, each kind of fault comes once."""
SEED = 1


@pytest.fixture(scope="module")
def folder(host: EngineHost, work_dir: Path) -> Path:
    host.close()  # one engine at a time
    return work_dir / "campaign"


@pytest.fixture(scope="module")
def questions(folder: Path) -> list[Question]:
    return Vllm(forked=True).reference(folder, SEED)


@pytest.fixture
def stores(policy: str) -> Iterator[SharedStores | None]:
    """Shared stores in one of the campaigns, where Mooncake Store is installed."""
    if policy != "recompute" or not mooncake_works():
        yield None
        return
    with SharedStores() as started:
        yield started


@pytest.mark.parametrize("policy", Vllm.policies)
def test_whatever_breaks_no_answer_is_wrong(
    folder: Path, questions: list[Question], policy: str, stores: SharedStores | None
) -> None:
    campaign = Campaign(
        Vllm(forked=True),
        folder,
        questions,
        policy=policy,
        clients=8,
        seed=SEED,
        stores=stores,
        say=print,
    )
    report = campaign.run(SECONDS, restart=False)
    assert report.checks
    assert [check for check in report.checks if not check.held] == [], report.as_dict()
