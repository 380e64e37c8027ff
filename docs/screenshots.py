# SPDX-License-Identifier: Apache-2.0
"""Takes the pictures of `flexkv` on a terminal, for the site: `flexkv plan` on a trace, and
`flexkv top` on a running engine.

    python docs/screenshots.py --trace mooncake-conversation.jsonl --engine localhost:8000
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

ASSETS = Path(__file__).parent / "pages" / "assets"
COLUMNS, ROWS = 120, 40
_LIVE_SECONDS = 15.0
"""Rates are those of the last ten seconds."""
_OTHER_SCREEN, _USUAL_SCREEN = b"\x1b[?1049h", "\x1b[?1049l"
"""A view has a screen of its own."""
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
    command = [sys.executable, "-m", "flexkv", *arguments]
    ended = subprocess.run(
        command, env=_environment(), cwd=folder, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"flexkv {' '.join(arguments)} failed: {ended.stderr or ended.stdout}")
    _draw(ended.stdout, f"flexkv {' '.join(arguments)}", path)


def take_live(arguments: Sequence[str], path: Path, seconds: float) -> None:
    """Run `flexkv` on a terminal, press q, and draw its last view.

    Args:
        arguments: of the command.
        path: of the picture, an SVG.
        seconds: that the view is shown until q is pressed.

    Raises:
        RuntimeError: the command failed, or ended before.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", ROWS, COLUMNS, 0, 0))
    command = [sys.executable, "-m", "flexkv", *arguments]
    process = subprocess.Popen(
        command, env=_environment(), stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    shown = b""
    end = math.inf
    try:
        # A terminal that all have left reads as an error.
        with contextlib.suppress(OSError):
            while True:
                if select.select([master], [], [], 0.1)[0]:
                    shown += os.read(master, 1 << 16)
                if end == math.inf and _OTHER_SCREEN in shown:
                    end = time.monotonic() + seconds
                if time.monotonic() >= end:
                    os.write(master, b"q")
                    end = time.monotonic() + 1.0
    finally:
        # The command has left the terminal, and ends.
        code = process.wait()
        os.close(master)
    # The last view is printed once the terminal shows its usual screen again.
    before, found, last = shown.decode().rpartition(_USUAL_SCREEN)
    if code or not found:
        raise RuntimeError(f"flexkv {' '.join(arguments)} failed: {before or last}")
    _draw(last, f"flexkv {' '.join(arguments)}", path)


def _environment() -> dict[str, str]:
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    return environment


def _draw(printed: str, title: str, path: Path) -> None:
    # Beside colours a terminal is told of its cursor. Dim text would have too little contrast.
    text = Text.from_ansi(re.sub(r"\x1b\[\?\d+[hl]|\x1b\[2m|\r", "", printed).strip("\n"))
    text.rstrip()
    width = max(len(title) + _BUTTONS, *(line.cell_len for line in text.split()))
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
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
        take_live(["top", args.engine], ASSETS / "top.svg", _LIVE_SECONDS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
