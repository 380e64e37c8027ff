# SPDX-License-Identifier: Apache-2.0
"""Has an engine's own parser read command lines, in a process that has imported the engine.

Run as ``python -m docs.tests.read_options ENGINE FILE``. Each line of FILE is a list of arguments
in JSON. A line of the output says how many were read, if all were.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path


def _vllm() -> argparse.ArgumentParser:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return parser


def _sglang() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


_PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {"vllm": _vllm, "sglang": _sglang}


def said(count: int) -> str:
    """That line, after `count` command lines."""
    return f"command lines read: {count}"


def main() -> None:
    """Read all; a parser ends the process at the first that it refuses."""
    engine, path = sys.argv[1:]
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    with contextlib.suppress(SystemExit):
        for line in lines:
            _PARSERS[engine]().parse_args(json.loads(line))
        print(said(len(lines)))
    sys.stdout.flush()
    sys.stderr.flush()
    # At the interpreter's end, libraries of an engine would print what they leak.
    os._exit(0)


if __name__ == "__main__":
    main()
