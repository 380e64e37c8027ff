# SPDX-License-Identifier: Apache-2.0
"""What SGLang's page says was run or refused is what the tests run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/pages/start/sglang.md"
REFUSALS = ROOT / "integration/sglang/with_sglang/test_refused_arguments.py"


def test_each_flag_that_is_refused_is_refused_in_a_test() -> None:
    tested = REFUSALS.read_text()
    rows = [line for line in PAGE.read_text().splitlines() if "| refused, names " in line]
    flags = [flag for row in rows for flag in re.findall(r"`(--[a-z-]+)`", row.split("names")[1])]
    assert len(flags) > len(rows) > 10
    assert [flag for flag in flags if flag not in tested] == []


def test_each_feature_was_run_or_is_refused() -> None:
    table = PAGE.read_text().partition("### What was run")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 20
    for row in rows:
        assert re.search(r"\| (equal tokens|refused, names `--)", row), row


def test_every_replaced_method_has_a_reason() -> None:
    table = PAGE.read_text().partition("## What FlexKV replaces in SGLang")[2]
    named = re.findall(r"^\| `([\w.]+)` \| \w", table, re.MULTILINE)
    hooks = (ROOT / "packages/flexkv-sglang/src/flexkv_sglang/hooks.py").read_text()
    classes = dict(re.findall(r'^(_[A-Z]+) = "(\S+)"$', hooks, re.MULTILINE))
    table = hooks.partition("\nHOOKS: ")[2].partition("\n}\n")[0]
    replaced = [
        ".".join(re.sub(r"\{(\w+)\}", lambda each: classes[each[1]], name).split(".")[-2:])
        for name in re.findall(r'^    f?"(\S+)": \w+,$', table, re.MULTILINE)
    ]
    assert sorted(named) == sorted(replaced)
    assert len(named) == 14
