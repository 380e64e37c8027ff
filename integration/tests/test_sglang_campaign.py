# SPDX-License-Identifier: Apache-2.0
"""SGLang's fault campaign, short: `nox -s campaign -- --engine sglang` is the long one."""

from __future__ import annotations

from pathlib import Path

from integration.campaign.run import Campaign
from integration.campaign.sglang import Sglang

SECONDS = 20
SEED = 1


def test_whatever_breaks_no_answer_is_wrong(sglang: Path, tmp_path: Path) -> None:
    engine = Sglang(forked=True)
    questions = engine.reference(tmp_path, SEED)
    campaign = Campaign(engine, tmp_path, questions, policy="fail", clients=8, seed=SEED, say=print)
    report = campaign.run(SECONDS, restart=False)
    assert report.checks
    assert [check for check in report.checks if not check.held] == [], report.as_dict()
