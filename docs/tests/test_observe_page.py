# SPDX-License-Identifier: Apache-2.0
"""The page on watching lists the alerts that there are, and how severe they are."""

from __future__ import annotations

import re
from pathlib import Path

from dashboards.alerts import alerts
from dashboards.names import Names

PAGE = Path(__file__).parents[1] / "pages" / "guides" / "observe.md"


def test_the_page_lists_the_alerts_in_their_order() -> None:
    text = PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(FlexKV\w+)` \| (\w+) \|", text, re.MULTILINE)
    made = alerts(Names("vllm:flexkv_", "", "10m", "10m"))
    assert listed == [(each.name, each.severity.value) for each in made]
