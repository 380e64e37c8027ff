# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus that scrapes one engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

from integration.harness.ports import hold_port

INSTALLED = shutil.which("prometheus") is not None
HOW = "prometheus is missing (Debian: apt install prometheus)"
# For what hangs.
_START_SECONDS = 600.0
_CALL_SECONDS = 300.0
_CONFIG = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs: [{{job_name: engine, static_configs: [{{targets: ["{target}"]}}]}}]
"""


class Prometheus:
    """Scrapes every second, and evaluates rules. A context manager that ends it.

    Args:
        target: host and port of the engine's server.
        rules: a file of rules.
        folder: for its data and its log; it must not exist.

    Raises:
        RuntimeError: it did not start; nothing of it is left then.
    """

    def __init__(self, target: str, rules: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        config = folder / "prometheus.yml"
        config.write_text(_CONFIG.format(rules=json.dumps(str(rules)), target=target))
        self._held = hold_port()
        self._url = f"http://127.0.0.1:{self._held.getsockname()[1]}/api/v1"
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._held.getsockname()[1]}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def query(self, expr: str) -> list[float]:
        """The values that PromQL has now.

        Raises:
            urllib.error.HTTPError: it is no PromQL.
        """
        found = self._ask(f"query?{urllib.parse.urlencode({'query': expr})}")["result"]
        return [float(each["value"][1]) for each in found]

    def rules(self) -> dict[str, list[str]]:
        """Health and last error of each rule, by its name; rules of several groups together."""
        rules: dict[str, list[str]] = {}
        for group in self._ask("rules")["groups"]:
            for rule in group["rules"]:
                rules.setdefault(rule["name"], []).append(
                    rule["health"] + rule.get("lastError", "")
                )
        return rules

    def close(self) -> None:
        """End it. Idempotent."""
        self._process.terminate()
        self._process.wait()
        self._held.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if self.query("up") == [1.0]:
                    return
            except (urllib.error.URLError, ConnectionError):
                pass
            time.sleep(0.2)
        raise RuntimeError(f"Prometheus scrapes nothing; its log:\n{self._log.read_text()[-2000:]}")

    def _ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/{path}", timeout=_CALL_SECONDS) as answer:
            return json.load(answer)["data"]
