# SPDX-License-Identifier: Apache-2.0
"""Traces of every format become the same requests."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from flexkv.plan import trace as traces
from flexkv.plan.read import ReadOptions, TraceFile, read_trace
from flexkv.plan.trace import Trace
from flexkv.types.errors import TraceError

A, B, C = list(range(100, 116)), list(range(200, 216)), list(range(300, 316))


def write(path: Path, *lines: object) -> str:
    path.write_text(
        "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
    )
    return str(path)


def shape(trace: Trace) -> list[tuple[float, list[int], list[int], int, int]]:
    return [
        (each.seconds, list(each.blocks), list(each.answer), each.prompt_tokens, each.output_tokens)
        for each in trace.requests
    ]


def mooncake(timestamp: int, length: int, ids: list[int]) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": length, "output_length": 7, "hash_ids": ids}


def test_mooncakes_incomplete_last_block_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "t", mooncake(2000, 1030, [5, 6, 9]), "", mooncake(1000, 1024, [5, 6]))
    trace = read_trace(path).trace
    assert (trace.form, trace.block_tokens, trace.distinct_blocks) == ("mooncake", 512, 2)
    assert shape(trace) == [(1.0, [0, 1], [], 1024, 7), (2.0, [0, 1], [], 1030, 7)]


def test_equal_ids_behind_different_prefixes_are_different_blocks(tmp_path: Path) -> None:
    path = write(tmp_path / "t", mooncake(0, 1024, [1, 9]), mooncake(1, 1024, [2, 9]))
    assert read_trace(path).trace.distinct_blocks == 4


def test_the_size_of_blocks_is_found_out(tmp_path: Path) -> None:
    path = write(tmp_path / "t", mooncake(0, 160, list(range(10))), mooncake(1, 20, [0, 99]))
    assert read_trace(path).trace.block_tokens == 16


def test_token_ids_become_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t",
        "some other line",
        {"prompt_token_ids": [*A, *B, 1], "timestamp": 5, "output_token_ids": [*C[1:], 2, 3]},
        {"prompt_token_ids": [*A, *B, *C], "timestamp": 6, "session": "s"},
        {"prompt_token_ids": [*B, *A], "timestamp": 4},
    )
    trace = read_trace(path).trace
    assert trace.form == "tokens"
    assert shape(trace) == [
        (4.0, [0, 1], [], 32, 0),
        (5.0, [2, 3], [4], 33, 17),
        (6.0, [2, 3, 5], [], 48, 0),
    ]
    assert trace.requests[2].session == "s"


def test_an_answer_fills_the_block_that_the_prompt_began(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t",
        {"prompt_token_ids": A[:10], "output_token_ids": [*A[10:], 7]},
        {"prompt_token_ids": [*A, 1]},
    )
    first, second = read_trace(path).trace.requests
    assert (first.blocks, first.answer) == ([], second.blocks)


def test_the_last_token_of_an_answer_has_no_kv(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t",
        {"prompt_token_ids": [*B, *A[:10]], "output_token_ids": A[10:]},
    )
    (request,) = read_trace(path).trace.requests
    assert request.answer == []


def recorded(**fields: Any) -> dict[str, Any]:
    usual = {"t": 1.5, "in": 33, "out": 20, "own": 0, "hit": 16, "blocks": "a" * 16 + "b" * 16}
    return usual | fields


HEAD = {"flexkv_trace": 1, "engine": "vllm", "block_tokens": 16, "block_bytes": 4096, "began": 50}


def test_a_recording_says_its_sizes_and_what_was_measured(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t",
        HEAD,
        recorded(),
        " ",
        {"prefill": [0.25, 0.5]},
        recorded(t=0.5, own=16, hit=0, blocks="a" * 16 + "c" * 32, session="x"),
    )
    read = read_trace(path)
    trace = read.trace
    assert (trace.form, trace.block_tokens, trace.block_bytes) == ("flexkv", 16, 4096)
    assert trace.prefill == (0.25, 0.5)
    assert shape(trace) == [(50.5, [0, 1], [2], 33, 20), (51.5, [0, 3], [], 33, 20)]
    assert trace.requests[0].session == "x"
    measured = read.measured
    assert measured is not None
    assert (measured.prompt_tokens, measured.engine_tokens, measured.hit_tokens) == (66, 16, 16)


def test_names_mean_nothing_behind_another_head(tmp_path: Path) -> None:
    path = write(tmp_path / "t", HEAD, recorded(), HEAD | {"began": 90}, recorded())
    trace = read_trace(path).trace
    assert [each.blocks for each in trace.requests] == [[0, 1], [2, 3]]


def test_a_line_that_was_cut_off_ends_the_trace(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "t", HEAD, recorded()))
    path.write_text(path.read_text() + '{"t": 3, "in": 3')
    trace = read_trace(str(path)).trace
    assert len(trace.requests) == 1
    assert trace.skipped == {"in a last line whose end is missing": 1}
    path.write_text(path.read_text() + "\n")
    with pytest.raises(TraceError, match=r"line 3 of .*no JSON"):
        read_trace(str(path))


def test_a_compressed_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(json.dumps(mooncake(0, 512, [1])).encode()))
    assert len(read_trace(str(path)).trace.requests) == 1


@pytest.mark.parametrize("damage", ["bytes", "end"])
def test_a_damaged_compressed_trace_is_named(tmp_path: Path, damage: str) -> None:
    lines = [json.dumps(mooncake(0, 512, [number])) + "\n" for number in range(500)]
    data = bytearray(gzip.compress("".join(lines).encode()))
    if damage == "bytes":
        data[40:60] = b"\xff" * 20
    else:
        del data[-20:]
    path = tmp_path / "t.gz"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"cannot read '.*t\.gz' from TRACE .*; allowed: "):
        read_trace(str(path))


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t")
    with pytest.raises(TraceError, match="not a regular file"):
        read_trace(str(tmp_path / "t"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (mooncake(0, 512, [1]) | {"input_length": -1}, "input_length is -1"),
        (mooncake(0, 512, [1]) | {"input_length": 1.5}, "input_length is 1.5"),
        (mooncake(0, 512, [1]) | {"timestamp": "x"}, "timestamp is 'x'"),
        (mooncake(0, 512, [1]) | {"timestamp": None}, "timestamp is None"),
        (mooncake(0, 512, [1]) | {"timestamp": True}, "timestamp is True"),
        (mooncake(0, 512, [1]) | {"timestamp": -5}, "timestamp is -5"),
        (mooncake(0, 512, [1]) | {"timestamp": "2026-13-01"}, "timestamp is '2026-13-01'"),
        (mooncake(0, 5000, [1]), "1 ids for 5000 tokens"),
        ({"hash_ids": [True]}, r"hash_ids is \[True\]"),
        (
            {"hash_ids": [1], "input_length": 512, "session_id": "s"},
            "start of the session is missi",
        ),
        ({"block_size": 64, "requests": []}, "start of the session is missing"),
        ({"hash_ids": "abc"}, "hash_ids is 'abc'"),
        ({"prompt_token_ids": [1 << 32] * 20}, "a token id is out of range"),
        ({"prompt_token_ids": [-1] * 20}, "a token id is out of range"),
        ({"prompt_token_ids": ["x"]}, "prompt_token_ids is"),
        ({"prompt_token_ids": A, "output_token_ids": 5}, "output_token_ids is 5"),
        (HEAD | {"flexkv_trace": 2}, "flexkv_trace is 2"),
        (HEAD | {"block_tokens": 0}, "block_tokens is 0"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: dict[str, object], says: str) -> None:
    with pytest.raises(TraceError, match=f"line 1 of .*{says}.*; allowed: "):
        read_trace(write(tmp_path / "t", line))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"blocks": "abc"}, "blocks is 'abc'"),
        ({"blocks": "a" * 64}, "4 names for 53 tokens"),
        ({"in": 0}, "in is 0"),
        ({"own": None}, "own is None"),
        ({"session": 5}, "session is 5"),
        ({"t": -1}, "t is -1"),
        ({"prefill": [1]}, r"prefill is \[1\]"),
    ],
)
def test_a_bad_line_of_a_recording_is_named(
    tmp_path: Path, fields: dict[str, object], says: str
) -> None:
    with pytest.raises(TraceError, match=f"line 2 of .*{says}.*; allowed: "):
        read_trace(write(tmp_path / "t", HEAD, recorded(**fields)))


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(json.dumps(mooncake(0, 512, [1])) + "\n", encoding="utf-8-sig")
    assert len(read_trace(str(path)).trace.requests) == 1


def bailian(chat: int, parent: int, timestamp: float, length: int, last: int) -> dict[str, object]:
    ids = [*range(length // 16), last]
    return {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": timestamp,
        "input_length": length,
        "output_length": 7,
        "type": "text",
        "turn": 1,
        "hash_ids": ids,
    }


def test_bailians_times_are_seconds_and_its_chats_are_sessions(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t",
        bailian(159, -1, 61.125, 521, 99),
        bailian(160, 159, 3661.125, 540, 98),
        bailian(161, -1, 3662.0, 521, 97),
        bailian(162, 160, 3663.0, 540, 98),
    )
    trace = read_trace(path).trace
    assert (trace.form, trace.block_tokens) == ("bailian", 16)
    assert [each.seconds for each in trace.requests[:2]] == [61.125, 3661.125]
    assert [each.session for each in trace.requests] == ["159", "159", "161", "159"]
    assert trace.requests[0].blocks == list(range(32))


@pytest.mark.parametrize(
    ("first", "unit", "seconds"),
    [
        (2000, "auto", 2.0),
        (2000, "s", 2000.0),
        (2000, "us", 0.002),
        (1_753_780_607, "auto", 1_753_780_607.0),
        (1_753_780_607_500, "auto", 1_753_780_607.5),
        ("1753780607500000000", "auto", 1_753_780_607.5),
        ("2025-07-29T09:16:47.5Z", "auto", 1_753_780_607.5),
    ],
)
def test_the_unit_of_time(tmp_path: Path, first: object, unit: str, seconds: float) -> None:
    path = write(tmp_path / "t", mooncake(0, 512, [1]) | {"timestamp": first})
    (request,) = read_trace(path, ReadOptions(unit=unit)).trace.requests
    assert request.seconds == pytest.approx(seconds, abs=1e-6)


def test_turns_of_benchmark_clients_follow_by_their_delay(tmp_path: Path) -> None:
    row = {"input_length": 512, "output_length": 5}
    path = write(
        tmp_path / "t",
        row | {"session_id": "a", "timestamp": 1000, "hash_ids": ["x"]},
        row | {"session_id": "b", "timestamp": 1500, "hash_ids": ["x"]},
        {"session_id": "a", "delay": 2500, "input_length": 1024, "hash_ids": ["x", -(1 << 70)]},
    )
    trace = read_trace(path).trace
    assert [(each.seconds, each.session) for each in trace.requests] == [
        (1.0, "a"),
        (1.5, "b"),
        (3.5, "a"),
    ]
    assert [each.blocks for each in trace.requests] == [[0], [0], [0, 1]]
    assert trace.requests[2].output_tokens == 0


def test_rows_with_texts_in_place_of_hashes_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "t", mooncake(0, 512, [1]), {"timestamp": 5, "text_input": "hello"})
    trace = read_trace(path).trace
    assert len(trace.requests) == 1
    assert trace.skipped == {"without hash_ids": 1}


def session(name: str, *requests: dict[str, object], **fields: object) -> dict[str, object]:
    return {"id": name, "block_size": 64, "requests": list(requests)} | fields


def agent(t: float, *ids: int) -> dict[str, object]:
    return {"t": t, "type": "s", "in": 64 * len(ids), "out": 9, "hash_ids": list(ids)}


def test_sessions_of_agents_start_at_equal_distances(tmp_path: Path) -> None:
    subagent = {"type": "subagent", "t": 5.0, "requests": [agent(0.0, 7), agent(1.0, 7, 8)]}
    absolute = {"type": "subagent", "t": 8.0, "requests": [agent(8.5, 7)]}
    path = write(
        tmp_path / "t",
        session("a", agent(0.0, 1, 2), subagent, absolute, {"t": 9.0, "type": "n"}),
        session("b", agent(0.5, 1, 2)),
    )
    read = read_trace(path, ReadOptions(sessions_per_hour=60))
    trace = read.trace
    assert (trace.form, trace.block_tokens, read.made_starts) == ("sessions", 64, 2)
    assert trace.skipped == {"without hash_ids": 1}
    assert [(each.seconds, each.blocks) for each in trace.requests] == [
        (0.0, [0, 1]),
        (5.0, [2]),
        (6.0, [2, 3]),
        (8.5, [2]),
        (60.5, [4, 5]),
    ]
    with pytest.raises(TraceError, match=r"line 1 .* start of the session is missing; allowed: "):
        read_trace(path)


def test_ids_of_global_scope_mean_the_same_in_all_sessions(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t",
        session("a", agent(0.0, 1, 2), hash_id_scope="global"),
        session("b", agent(0.0, 1, 2), hash_id_scope="global"),
    )
    trace = read_trace(path, ReadOptions(sessions_per_hour=60)).trace
    assert [each.blocks for each in trace.requests] == [[0, 1], [0, 1]]


def test_objects_over_several_lines_or_on_one_are_read(tmp_path: Path) -> None:
    first, second = session("a", agent(0.0, 1)), session("b", agent(0.0, 1))
    path = tmp_path / "t"
    path.write_text(json.dumps(first, indent=1) + "\n" + json.dumps(second, indent=1))
    assert len(read_trace(str(path), ReadOptions(sessions_per_hour=60)).trace.requests) == 2
    path.write_text(json.dumps(first) + json.dumps(second))
    assert len(read_trace(str(path), ReadOptions(sessions_per_hour=60)).trace.requests) == 2


@pytest.mark.parametrize(
    ("reading", "says"),
    [
        (ReadOptions(sessions_per_hour=5), "'5' from --sessions-per-hour has no use"),
        (ReadOptions(form="flexkv", unit="s"), "'s' from --time-unit cannot be used .* flexkv"),
        (ReadOptions(form="sessions", block_tokens=16), "16 from --block-tokens cannot be used"),
    ],
)
def test_options_without_a_use_are_refused(tmp_path: Path, reading: ReadOptions, says: str) -> None:
    path = write(tmp_path / "t", mooncake(0, 512, [1]))
    with pytest.raises(TraceError, match=f"{says}.*; allowed: "):
        read_trace(path, reading)


def test_a_request_without_token_ids_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "t", {"prompt_token_ids": []}, {"prompt_token_ids": A}, {"other": 1})
    trace = read_trace(path).trace
    assert len(trace.requests) == 1
    assert trace.skipped == {"without token ids": 1}


def test_a_log_is_no_trace(tmp_path: Path) -> None:
    line = f"INFO 11-25 10:00:00 Received request r1: prompt: 'a', prompt_token_ids: {A}"
    with pytest.raises(TraceError, match=r"no line of a known trace; allowed: .*mooncake, "):
        read_trace(write(tmp_path / "t", line))


def test_a_sparse_file_has_an_end(tmp_path: Path) -> None:
    """To read a TiB would take longer than a test may."""
    path = tmp_path / "t"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(TraceError, match=r"line 1 of .* has 268,435,456 characters or more"):
        read_trace(str(path))
    write(path, mooncake(0, 1024, [5, 6]))
    os.truncate(path, 1 << 40)
    read = read_trace(str(path))
    assert len(read.trace.requests) == 1
    assert read.trace.skipped == {"in a last line whose end is missing": 1}


@pytest.mark.parametrize("first", [[], [mooncake(0, 1024, [5, 6])]])
def test_a_line_that_is_too_long_ends_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: list[object]
) -> None:
    monkeypatch.setattr("flexkv.plan.read._MOST_LINE", 1 << 16)
    last = mooncake(1, 1024, [5, 6])
    path = write(tmp_path / "t", *first, "{" + " " * (1 << 16) + "}", last)
    with pytest.raises(TraceError, match=f"line {len(first) + 1} of .* has 65,536 characters"):
        read_trace(path)


def pack(path: Path, *parts: tuple[bytes, int]) -> str:
    """Each part so many times, packed by gzip."""
    with gzip.open(path, "wb", 6) as file:
        for part, count in parts:
            file.write(part * count)
    return str(path)


EQUAL = json.dumps(mooncake(0, 512, [1])).encode() + b"\n"
ONE_LINE = ((EQUAL[:-4], 1), (b",0", 1 << 20), (b"]}\n", 1))


@pytest.mark.parametrize(
    "parts",
    [((EQUAL, 1 << 16),), ((b"\n", 1 << 24),), ONE_LINE, ((EQUAL, 150), *ONE_LINE)],
    ids=["equal requests", "empty lines", "one line", "one line behind others"],
)
def test_a_small_file_that_unpacks_to_a_large_text_is_refused(
    tmp_path: Path, parts: tuple[tuple[bytes, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pack(tmp_path / "t.gz", *parts)
    unpacked: list[int] = []
    read1 = gzip.GzipFile.read1

    def note(file: gzip.GzipFile, size: int = -1) -> bytes:
        data = read1(file, size)
        unpacked.append(len(data))
        return data

    monkeypatch.setattr(gzip.GzipFile, "read1", note)
    with pytest.raises(TraceError, match=r"gzip made it smaller than 1/128; unpack it before"):
        read_trace(path)
    most = (1 << 20) + 128 * os.path.getsize(path)
    assert most - max(unpacked) <= sum(unpacked) <= most + max(unpacked)


def test_a_pipe_has_the_same_bounds_and_progress_without_a_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float | None] = []

    def piped(count: int) -> TraceFile:
        packed = Path(pack(tmp_path / "t.gz", (EQUAL, count))).read_bytes()
        end, start = os.pipe()
        os.write(start, packed)  # less than a pipe holds
        os.close(start)
        with open(end) as pipe, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", pipe)
            return read_trace("-", progress=shares.append)

    assert len(piped(5000).trace.requests) == 5000
    assert shares == [None] * 25
    with pytest.raises(TraceError, match=r"gzip made it smaller"):
        piped(1 << 16)


def test_a_small_trace_may_be_packed_well(tmp_path: Path) -> None:
    trace = read_trace(pack(tmp_path / "t.gz", (EQUAL, 5000))).trace
    assert len(trace.requests) == 5000


@pytest.mark.parametrize(("requests", "looks"), [(3, 1), (70000, 1 + 350 + 1)])
def test_a_trace_that_takes_too_much_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: int, looks: int
) -> None:
    """While it is read, or while its blocks are numbered, after as many looks at the memory."""
    path = write(tmp_path / "t", *(mooncake(i, 512, [i]) for i in range(requests)))
    taken = iter([0] * looks)
    monkeypatch.setattr(traces, "available_memory", lambda: 2 << 30)
    monkeypatch.setattr(traces, "_resident", lambda: next(taken, (1 << 30) + 1))
    with pytest.raises(TraceError, match=r"takes more than 1\.00 GiB of memory, half of what is"):
        read_trace(path)


def test_progress_is_reported_between_long_lines(tmp_path: Path) -> None:
    line = mooncake(0, 1024, [5, 6]) | {"text": "x" * (1 << 24)}
    path = write(tmp_path / "t", *[line] * 4)
    shares: list[float | None] = []
    read_trace(path, progress=shares.append)
    assert len(shares) == 4


def test_progress_is_the_share_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t", *(mooncake(i, 512, [i]) for i in range(5000)))
    shares: list[float | None] = []
    read_trace(path, progress=shares.append)
    assert len(shares) == 25
    known = [each for each in shares if each is not None]
    assert known == sorted(shares, key=lambda share: share or 0.0)
    assert 0.9 < known[-1] <= 1.0
