# SPDX-License-Identifier: Apache-2.0
"""The command line of `flexkv plan`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from flexkv.eviction import POLICIES
from flexkv.plan import clock
from flexkv.plan.model import KV_DTYPES
from flexkv.plan.read import AUTO, FORMS, STANDARD_INPUT
from flexkv.plan.sizing import GIB
from flexkv.types.admission import ADMISSIONS
from flexkv.types.errors import TraceError
from flexkv.types.texts import exact

_MOST_GIB = float(1 << 20)
_MOST_TOKENS = 1 << 20
_MOST_RATE = 1e9
_MOST_USES = 1 << 40
_USES = 2_000_000
"""The most uses of blocks in a replay by default: 2 s without a disk, and 6 to 34 s with one, as
measured on one core."""
_LOAD_GIB, _DISK_GIB = 20.0, 4.0
"""GiB a second of loads by default: PCIe 4.0 with 16 lanes and one NVMe drive, about."""
_DRIVE_WRITES, _MOST_DRIVE_WRITES = 1.0, 1000.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for, as `add_arguments` describes it. Sizes are in GiB, rates in tokens
    or GiB a second. None is what the user has not given."""

    trace: str
    form: str
    block_tokens: int | None
    time_unit: str
    sessions_per_hour: float | None
    model: str | None
    kv_dtype: str
    token_bytes: float | None
    sizes: Sequence[float]
    most_memory: float | None
    most_disk: float | None
    engine: float
    prefill_rate: float | None
    load_rate: float
    disk_rate: float
    drive_writes: float
    policies: Sequence[str]
    admissions: Sequence[str]
    most_uses: int
    plot: str | None
    json: bool


def read_options(args: argparse.Namespace) -> Options:
    """Check the values of all options.

    Raises:
        TraceError: a value is not allowed.
    """
    _one_of("--format", args.format, FORMS)
    _one_of("--time-unit", args.time_unit, (clock.AUTO, *clock.UNITS))
    _one_of("--kv-dtype", args.kv_dtype, KV_DTYPES)
    if args.model is not None and args.token_bytes is not None:
        raise TraceError("--model and --token-bytes are both given; allowed: one of them")
    writes = _number("--drive-writes-per-day", args.drive_writes_per_day, 1e-3, _MOST_DRIVE_WRITES)
    return Options(
        args.trace,
        args.format,
        _whole("--block-tokens", args.block_tokens, _MOST_TOKENS),
        args.time_unit,
        _number("--sessions-per-hour", args.sessions_per_hour, 1e-3, _MOST_RATE),
        args.model,
        args.kv_dtype,
        _number("--token-bytes", args.token_bytes, 1, float(GIB)),
        _sizes(args.memory_gb),
        _number("--max-memory-gb", args.max_memory_gb, 0, _MOST_GIB),
        _number("--max-disk-gb", args.max_disk_gb, 0, _MOST_GIB),
        _number("--engine-gb", args.engine_gb, 0, _MOST_GIB) or 0.0,
        _number("--prefill-rate", args.prefill_rate, 1e-3, _MOST_RATE),
        _number("--load-rate", args.load_rate, 1e-3, _MOST_RATE) or _LOAD_GIB,
        _number("--disk-rate", args.disk_rate, 1e-3, _MOST_RATE) or _DISK_GIB,
        writes or _DRIVE_WRITES,
        _names("--policies", args.policies, POLICIES),
        _names("--admissions", args.admissions, ADMISSIONS),
        _whole("--replay-blocks", args.replay_blocks, _MOST_USES) or _USES,
        args.plot,
        args.json,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help=f"the trace, or {STANDARD_INPUT} for standard input; may be compressed by gzip",
    )
    parser.add_argument(
        "--format",
        default=AUTO,
        metavar="NAME",
        help=f"format of the trace: {', '.join(FORMS)}; default: {AUTO}, which looks at the file",
    )
    parser.add_argument(
        "--block-tokens",
        metavar="N",
        help="tokens of a block; default: what the trace says, 16 for logs with token ids",
    )
    parser.add_argument(
        "--time-unit",
        default=clock.AUTO,
        metavar="UNIT",
        help=f"unit of the trace's times: {', '.join(clock.UNITS)}; default: that of the format; "
        "for times since 1970, the unit that gives a date of today",
    )
    parser.add_argument(
        "--sessions-per-hour",
        metavar="N",
        help="sessions that start in an hour, for traces that name times within a session only",
    )
    token = parser.add_argument_group("the size of a token (a recording says it itself)")
    token.add_argument(
        "--model", metavar="PATH", help="config.json of the model, or the directory with it"
    )
    token.add_argument(
        "--kv-dtype",
        default="auto",
        metavar="NAME",
        help=f"dtype of the engine's KV cache: {', '.join(KV_DTYPES)}; default: auto",
    )
    token.add_argument(
        "--token-bytes", metavar="N", help="bytes of a token in the KV cache, over all ranks"
    )
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--memory-gb", metavar="LIST", help="sizes in GiB to show, separated by commas"
    )
    machine.add_argument("--max-memory-gb", metavar="GIB", help="the most memory to name")
    machine.add_argument("--max-disk-gb", metavar="GIB", help="the most disk to name; 0 for none")
    machine.add_argument(
        "--engine-gb",
        metavar="GIB",
        help="the engine's own KV cache (its prefix cache); default: 0. Its hits are not counted",
    )
    machine.add_argument(
        "--prefill-rate",
        metavar="TOKENS",
        help="prompt tokens that the engine computes a second, on average over all prompts; "
        "default: as a recording measured",
    )
    machine.add_argument(
        "--load-rate",
        metavar="GIB",
        help="GiB a second from host memory to the engine, over all ranks; "
        f"default: {_LOAD_GIB:g}. Loading is taken off the time that hits save",
    )
    machine.add_argument(
        "--disk-rate",
        metavar="GIB",
        help=f"GiB a second from disk to host memory; default: {_DISK_GIB:g}",
    )
    machine.add_argument(
        "--drive-writes-per-day",
        metavar="N",
        help="how many times a day the advised disk may be written as a whole, as the drive's "
        f"data sheet says (DWPD); default: {_DRIVE_WRITES:g}",
    )
    compared = parser.add_argument_group("what is compared")
    compared.add_argument(
        "--policies",
        metavar="LIST",
        help="eviction policies of host memory, separated by commas, or none; "
        f"default: {','.join(POLICIES)}",
    )
    compared.add_argument(
        "--admissions",
        metavar="LIST",
        help="admissions of the disk, separated by commas, or none; "
        f"default: {','.join(ADMISSIONS)}",
    )
    compared.add_argument(
        "--replay-blocks",
        metavar="N",
        help="replay a sample of the conversations if all prompts and answers together have more "
        "blocks; policies at the advised memory are replayed on the whole trace up to eight times "
        f"as many. Default: {_USES}",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the curves: .png, .svg or .pdf")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def _sizes(text: str | None) -> list[float]:
    if text is None:
        return []
    allowed = f"numbers from 0 to {_MOST_GIB:.0f}, separated by commas"
    found = [_number("--memory-gb", part, 0, _MOST_GIB, allowed) for part in text.split(",")]
    return [each for each in found if each is not None]


def _names(option: str, text: str | None, known: Collection[str]) -> list[str]:
    if text is None:
        return list(known)
    names = [part.strip() for part in text.split(",")]
    if names == ["none"]:
        return []
    for name in names:
        if name not in known or names.count(name) > 1:
            allowed = f"{', '.join(known)}, each once and separated by commas, or none"
            raise TraceError(f"{name!r} from {option}; allowed: {allowed}")
    return names


def _one_of(option: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise TraceError(f"{value!r} from {option}; allowed: {', '.join(known)}")


def _whole(option: str, text: str | None, most: int) -> int | None:
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= most:
        raise TraceError(f"{text!r} from {option}; allowed: a whole number from 1 to {most}")
    return value


def _number(
    option: str, text: str | None, least: float, most: float, allowed: str = ""
) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        allowed = allowed or f"a number from {exact(least)} to {exact(most)}"
        raise TraceError(f"{text!r} from {option}; allowed: {allowed}")
    return value
