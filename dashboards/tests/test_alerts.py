# SPDX-License-Identifier: Apache-2.0
"""The alerts under Prometheus's own tool: each fires when it should, and only then."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.alerts import ENGINES, alerts, alerts_yaml
from dashboards.names import Names
from dashboards.tests.alert_cases import CASES, Case, Series

FOLDER = Path(__file__).parents[1]
RULES = FOLDER / "alerts.yml"
WHERE = {"model_name": "m", "instance": "host:8000"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing (Debian: apt install prometheus)"
)


def promtool(*arguments: object) -> str:
    """What promtool prints; fails the test if it fails."""
    command = ["promtool", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def rules(engine: str) -> dict[str, Any]:
    """The rules of the file, by the alert's name."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    (found,) = (group["rules"] for group in groups if group["name"] == f"flexkv-{engine}")
    return {rule["alert"]: rule for rule in found}


def test_the_file_is_current() -> None:
    assert RULES.read_text(encoding="utf-8") == alerts_yaml()


def test_every_alert_has_a_case_and_every_case_an_alert() -> None:
    for engine in ENGINES:
        names = [each.name for each in alerts(Names(f"{engine}:flexkv_", "", "10m", "10m"))]
        assert sorted(names) == sorted(CASES)
        assert list(rules(engine)) == names


@needs_promtool
def test_prometheus_takes_the_rules() -> None:
    count = len(ENGINES) * len(CASES)
    assert f"SUCCESS: {count} rules found" in promtool("check", "rules", "--lint-fatal", RULES)


@needs_promtool
@pytest.mark.parametrize("engine", ENGINES)
def test_each_alert_fires_and_does_not_fire(engine: str, tmp_path: Path) -> None:
    known = rules(engine)
    tests = [
        unit_test(engine, known[name], case, fires=fires)
        for name, case in CASES.items()
        for fires in (True, False)
    ]
    path = tmp_path / "tests.yml"
    content = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    promtool("test", "rules", path)


@needs_promtool
def test_no_alert_fires_at_rest(tmp_path: Path) -> None:
    """All series of all cases, none of which changes: all circuits closed, no engine disabled."""
    series = {name: "7x200" for case in CASES.values() for name in case.fires}
    states = ("circuits", "health")
    series = {name: "0x200" if name.startswith(states) else v for name, v in series.items()}
    looks = [{"eval_time": "150m", "alertname": name, "exp_alerts": []} for name in CASES]
    test = {"interval": "1m", "input_series": given("vllm", series), "alert_rule_test": looks}
    path = tmp_path / "tests.yml"
    content = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    promtool("test", "rules", path)


def unit_test(engine: str, rule: dict[str, Any], case: Case, *, fires: bool) -> dict[str, Any]:
    """A test of promtool. It compares all labels and annotations."""
    labels = WHERE | case.labels
    expected = {
        "exp_labels": labels | rule["labels"],
        "exp_annotations": {
            name: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)
            for name, text in rule["annotations"].items()
        },
    }
    look = {
        "eval_time": case.at,
        "alertname": rule["alert"],
        "exp_alerts": [expected] if fires else [],
    }
    series = given(engine, case.fires if fires else case.quiet)
    return {"interval": "1m", "input_series": series, "alert_rule_test": [look]}


def given(engine: str, series: Series) -> list[dict[str, str]]:
    """Series of one instance, with the engine's prefix."""
    where = ",".join(f'{label}="{value}"' for label, value in WHERE.items())
    return [
        {"series": f"{engine}:flexkv_{_with(name, where)}", "values": values}
        for name, values in series.items()
    ]


def _with(name: str, labels: str) -> str:
    """`name`, which may have labels, with more of them."""
    return f"{name[:-1]},{labels}}}" if name.endswith("}") else f"{name}{{{labels}}}"
