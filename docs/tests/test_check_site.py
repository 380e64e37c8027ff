# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from docs import check_site


def run(site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, check_site.__file__, str(site)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_site_that_loads_from_another_server_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "guides" / "node.html"
    page.parent.mkdir()
    index = tmp_path / "search" / "search_index.js"
    index.parent.mkdir()
    index.touch()
    own = (
        '<script src="../a.js"></script><link href="../b.css"><a href="https://example.org/">x</a>'
    )
    page.write_text(own)
    assert run(tmp_path).returncode == 0
    page.write_text(own + '<script src="https://example.org/c.js"></script>')
    ended = run(tmp_path)
    assert ended.returncode == 1
    assert "guides/node.html loads https://example.org/c.js" in ended.stdout


def test_a_site_without_pages_or_a_search_is_refused(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.returncode == 1
    assert "has no page" in ended.stdout
    assert "search_index.js is missing" in ended.stdout
