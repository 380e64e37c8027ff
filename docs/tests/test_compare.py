# SPDX-License-Identifier: Apache-2.0
"""The page "Compare" marks which cells `nox -s peers` runs, and names what the others say."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.peers import page

ROOT = Path(__file__).parents[2]
RUNS = {
    page.VLLM: ("vllm_caches", "files"),
    page.HICACHE: ("hicache_files", "files"),
    page.LMCACHE: ("lmcache_server",),
}
CELLS, SOURCES = page.cells(), page.sources()
ROWS = {row for _, row in CELLS}


@pytest.mark.parametrize("peer", page.PEERS)
def test_the_cells_that_are_marked_are_those_that_are_run(peer: str) -> None:
    modules = [ROOT / f"integration/peers/{name}.py" for name in RUNS[peer]]
    code = "".join(module.read_text(encoding="utf-8") for module in modules)
    run = {row for row in ROWS if f'"{row}"' in code}
    assert run == {row for row in ROWS if page.RUN in CELLS[peer, row]}


def test_each_other_cell_names_where_it_was_read() -> None:
    read = [key for key, cell in CELLS.items() if page.RUN not in cell]
    assert [key for key in read if not SOURCES.get(key)] == []
    assert {row for _, row in SOURCES} <= ROWS


def test_the_page_is_about_the_versions_that_are_run() -> None:
    nox = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    versions = page.versions()
    assert f'VLLM_VERSION = "{versions[page.VLLM]}"' in nox
    assert f'SGLANG_VERSION = "{versions[page.HICACHE]}"' in nox
    assert f'LMCACHE = "lmcache=={versions[page.LMCACHE]}"' in nox


def test_a_name_that_is_gone_or_has_come_is_noticed(tmp_path: Path) -> None:
    for name, text in (("a.py", "class Known: ..."), ("b.py", "encrypt")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    for where, absent, name, holds in (
        ("a.py", "", "Known", True),
        ("a.py", "", "Gone", False),
        ("a.py", "no ", "encrypt", True),
        ("./", "no ", "encrypt", False),
        ("gone/", "no ", "encrypt", False),
    ):
        assert page.looked_up(tmp_path, where, absent, name) == holds
