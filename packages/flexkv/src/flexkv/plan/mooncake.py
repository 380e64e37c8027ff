# SPDX-License-Identifier: Apache-2.0
"""Traces in Mooncake's format: lengths, and a number for each block of a prompt.

Each line is an object with `timestamp` in milliseconds, `input_length` and `output_length` in
tokens, and `hash_ids`. Equal ids mean equal prefixes. The last id may stand for an incomplete
block, which FlexKV does not cache.
"""

from __future__ import annotations

from collections.abc import Mapping

from flexkv.plan.fields import LineError, natural, number, show
from flexkv.plan.trace import Prefixes, Trace, TracedRequest

FORM = "mooncake"
_USUAL_BLOCKS = (16, 32, 64, 128, 256, 512, 1024)
"""The tokens of a block that are tried if the user names none."""
_MOONCAKES = 512
"""Tokens of a block in the traces that Mooncake's authors have published."""
_MILLISECOND = 1e-3


def recognises(line: Mapping[str, object]) -> bool:
    """Whether a line of a trace looks like this format."""
    return "hash_ids" in line


class Parser:
    """Reads the lines of one trace.

    Args:
        block_tokens: tokens of a block. If None, it is 512 if that fits all lines, else the largest
            usual size that fits.
    """

    def __init__(self, block_tokens: int | None) -> None:
        self._sizes = list(_USUAL_BLOCKS if block_tokens is None else (block_tokens,))
        self._rows: list[tuple[float, int, int, list[int]]] = []

    def add(self, line: Mapping[str, object]) -> None:
        """Read one line.

        Raises:
            LineError: the line violates the format.
        """
        ids = line.get("hash_ids")
        if not isinstance(ids, list) or any(type(each) is not int for each in ids):
            raise LineError("hash_ids", show(ids), "a list of whole numbers")
        prompt = natural(line, "input_length", least=1)
        fitting = [size for size in self._sizes if len(ids) in (prompt // size, -(-prompt // size))]
        if not fitting:
            sizes = " or ".join(map(str, self._sizes))
            raise LineError(
                "hash_ids",
                f"{len(ids)} numbers for {prompt} tokens",
                f"one number for each block of {sizes} tokens (see --block-tokens)",
            )
        self._sizes = fitting
        seconds = number(line, "timestamp") * _MILLISECOND
        self._rows.append((seconds, prompt, natural(line, "output_length"), ids))

    def trace(self, name: str) -> Trace:
        """Make a trace of all lines so far."""
        size = _MOONCAKES if _MOONCAKES in self._sizes else max(self._sizes)
        prefixes, requests = Prefixes(), []
        for seconds, prompt, output, ids in sorted(self._rows, key=lambda row: row[0]):
            blocks = prefixes.follow(ids[: prompt // size])
            requests.append(TracedRequest(seconds, blocks, (), prompt, output))
        return Trace(name, FORM, size, requests, len(prefixes))
