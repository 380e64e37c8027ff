# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import threading
from pathlib import Path

from flexkv.cli.input_text import read_input
from packages.flexkv.tests.cli.stores import Flexkv


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """As a shell passes it for `<(COMMAND)`."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    text = "é" * 100_000
    writer = threading.Thread(target=fifo.write_text, args=(text, "utf-8"))
    writer.start()
    assert read_input(str(fifo), 200_000) == text
    writer.join()


def test_what_has_no_end_is_an_error_and_not_read_in_part(flexkv: Flexkv) -> None:
    ended = flexkv("lookup", "/dev/zero")
    assert ended.code == 2
    assert f"larger than {64 << 20} bytes; allowed: a " in ended.err
