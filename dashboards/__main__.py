# SPDX-License-Identifier: Apache-2.0
"""Writes the dashboard and the alerts, or says whether the files are current."""

from __future__ import annotations

import argparse
from pathlib import Path

from dashboards.alerts import alerts_yaml
from dashboards.grafana import dashboard_json

FOLDER = Path(__file__).parent


def files() -> dict[Path, str]:
    """What each file must contain."""
    return {
        FOLDER / "flexkv.json": dashboard_json(),
        FOLDER / "alerts.yml": alerts_yaml(),
    }


def main() -> int:
    """Returns 1 if a file is not current and was not written."""
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the files")
    write = parser.parse_args().write
    outdated = 0
    for path, text in files().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if write:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
        else:
            print(f"{path} is outdated: run `python -m dashboards --write`")
            outdated = 1
    return outdated


if __name__ == "__main__":
    raise SystemExit(main())
