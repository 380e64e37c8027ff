# SPDX-License-Identifier: Apache-2.0
"""``python -m integration.peers``: prints peer, version, row and what was seen.

Rows that need a GPU are read: the names that the page gives must be in the wheels of its versions.
The exit status is 1 if the page says something else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from compat_ci import wheels
from integration.interrupts import interrupt_at_sigterm
from integration.peers import page
from integration.peers.lmcache_server import lmcache_findings
from integration.peers.page import HICACHE, LMCACHE, VLLM, Finding
from integration.peers.vllm_caches import vllm_findings
from integration.sglang import environment


def main() -> int:
    """Parse the command line and run. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Run what the page Compare says of other caches.")
    parser.add_argument("--only", choices=RUNS, help="run this peer alone, and read nothing")
    parser.add_argument("--cache", type=Path, required=True, help="keeps Python files of wheels")
    arguments = parser.parse_args()
    os.environ["DO_NOT_TRACK"] = "1"  # LMCache reports its use over the network
    versions, wrong = page.versions(), 0
    for finding in _findings(arguments.only, arguments.cache):
        said = "" if finding.holds else "DIFFERS FROM THE PAGE: "
        wrong += not finding.holds
        peer = f"{finding.peer} {versions[finding.peer]}"
        print(f"{peer} | {finding.row} | {said}{finding.seen}", flush=True)
    return int(bool(wrong))


def _findings(only: str | None, cache: Path) -> Iterator[Finding]:
    for peer in RUNS if only is None else [only]:
        with tempfile.TemporaryDirectory(prefix="flexkv-peers-") as folder:
            yield from RUNS[peer](Path(folder))
    if only is None:
        trees = {
            peer: wheels.fetch(page.WHEELS[peer], version, cache).path
            for peer, version in page.versions().items()
        }
        yield from page.read(trees)


def _hicache_findings(folder: Path) -> Iterator[Finding]:
    """What SGLang's Python finds."""
    module, files = "integration.peers.hicache_files", str(folder / "files")
    command = [str(environment.python()), "-m", module, files]
    env = os.environ | environment.FOR_ENGINES | {"PYTHONPATH": environment.python_path()}
    found = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    for line in found.splitlines():
        yield Finding(**json.loads(line))


RUNS: dict[str, Callable[[Path], Iterator[Finding]]] = {
    VLLM: vllm_findings,
    HICACHE: _hicache_findings,
    LMCACHE: lmcache_findings,
}

if __name__ == "__main__":
    interrupt_at_sigterm()
    sys.exit(main())
