# SPDX-License-Identifier: Apache-2.0
"""Takes the pictures of `flexkv` on a terminal, for the site: `flexkv plan` on a trace, and
`flexkv top` on a running engine.

    python docs/screenshots.py --trace mooncake-conversation.jsonl --engine localhost:8000
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

ASSETS = Path(__file__).parent / "pages" / "assets"
COLUMNS = 120
_BUTTONS = 20
"""Columns that the title leaves for the window's buttons on both sides."""
PLAN = ("--token-bytes", "131072", "--prefill-rate", "8000", "--max-memory-gb", "500")
"""As on the page about sizes: a token of Llama 3.1 8B in 16 bits."""


def take(arguments: Sequence[str], path: Path, folder: Path) -> None:
    """Run `flexkv` and draw what it prints.

    Args:
        arguments: of the command.
        path: of the picture, an SVG.
        folder: in which it runs, so that the picture names files only.

    Raises:
        RuntimeError: the command failed.
    """
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "flexkv", *arguments]
    ended = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"flexkv {' '.join(arguments)} failed: {ended.stderr or ended.stdout}")
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        text = Text.from_ansi(ended.stdout.rstrip())
        title = f"flexkv {' '.join(arguments)}"
        width = max(len(title) + _BUTTONS, *(line.cell_len for line in text.split()))
        console = Console(record=True, width=width, file=nowhere)
        console.print(text)
        drawn = console.export_svg(title=title, unique_id=path.stem)
    # Readers' browsers must not ask others for a font.
    drawn = re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
    path.write_text("\n".join(line.rstrip() for line in drawn.splitlines()) + "\n", "utf-8")


def main() -> int:
    """Take the pictures for which something was given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", help="a trace for `flexkv plan`")
    parser.add_argument("--engine", help="the address of an engine for `flexkv top`")
    args = parser.parse_args()
    if args.trace is None and args.engine is None:
        parser.error("nothing is given; allowed: --trace, --engine, or both")
    if args.trace is not None:
        trace = Path(args.trace).resolve()
        take(["plan", trace.name, *PLAN], ASSETS / "plan.svg", trace.parent)
    if args.engine is not None:
        take(["top", args.engine, "--once"], ASSETS / "top.svg", Path.cwd())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
