# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import pytest

from flexkv.cli import plan
from flexkv.eviction import FOLLOWING, POLICIES
from packages.flexkv.tests.cli import command
from packages.flexkv.tests.cli.stores import Flexkv
from packages.flexkv.tests.plan.test_sample import chats

TOKEN = ["--token-bytes", "4096"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """30 requests for one hot prompt of 4 blocks of 2 MiB, and a scan of 20 blocks, twice."""
    hot = [{"timestamp": i, "input_length": 2049, "hash_ids": [1, 2, 3, 4, -1]} for i in range(30)]
    scan = [
        {"timestamp": 86_400_000 + i, "input_length": 513, "hash_ids": [9 + i % 20, -1]}
        for i in range(40)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(each | {"output_length": 3}) + "\n" for each in hot + scan))
    return path


def test_the_knee_and_the_settings_are_named(flexkv: Flexkv, trace: Path) -> None:
    ended = flexkv("plan", trace, *TOKEN, "--prefill-rate", "1000", "--json")
    assert ended.code == 0
    found = ended.json
    block = 512 * 4096
    assert found["trace"]["requests"] == 70
    assert found["trace"]["prefill_seconds"] == pytest.approx((30 * 2049 + 40 * 513) / 1000)
    assert found["knee"]["blocks"] == 4
    assert found["knee"]["bytes"] == 4 * block
    loading = 29 * 4 * block / (1 << 30) / 20
    assert found["knee"]["saved_seconds"] == pytest.approx(29 * 4 * 0.512 - loading)
    assert found["most"]["hit_rate"] == pytest.approx((29 * 4 + 20) * 512 / found_tokens())
    assert found["most"]["written_bytes_day"] == pytest.approx(24 * block, rel=1e-4)
    assert {each["policy"] for each in found["policies"]} == set(POLICIES)
    assert {each["admission"] for each in found["admissions"]} == {
        "write_through",
        "second_hit",
        "on_evict",
    }
    assert found["settings"]["cpu_cache_gb"] * (1 << 30) >= 4 * block
    assert found["settings"]["ssd_cache_gb"] * (1 << 30) >= 20 * block
    assert found["settings"]["ssd_write_gb_per_day"] == found["settings"]["ssd_cache_gb"]
    assert found["advised"]["hit_rate"] == pytest.approx(found["most"]["hit_rate"])
    assert found["advised"]["replayed_share"] == 1


def test_hits_of_each_policy_at_each_size_are_those_of_replays(flexkv: Flexkv, trace: Path) -> None:
    found = flexkv("plan", trace, *TOKEN, "--json").json
    for row in found["sizes"]:
        assert {"lru", *(each["policy"] for each in row["policies"])} == set(POLICIES)
    (row,) = (row for row in found["sizes"] if row["blocks"] == found["knee"]["blocks"])
    by_policy = {each["policy"]: each["hit_rate"] for each in found["policies"]}
    assert by_policy == {
        "lru": pytest.approx(row["hit_rate"]),
        **{each["policy"]: each["hit_rate"] for each in row["policies"]},
    }


def repeated(path: Path, times: int, blocks: int, apart: float) -> Path:
    """One long prompt again and again."""
    line = {"input_length": blocks * 512 + 1, "output_length": 1, "hash_ids": list(range(blocks))}
    rows = ({"timestamp": round(1000 * apart * i)} | line for i in range(times))
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def test_a_curve_without_a_knee_gets_memory_for_nearly_all_hits(
    flexkv: Flexkv, tmp_path: Path
) -> None:
    path = repeated(tmp_path / "t", 20, 2000, 60)
    found = flexkv("plan", path, *TOKEN, "--json").json
    assert found["knee"] is None
    assert found["settings"]["cpu_cache_gb"] * (1 << 30) >= 1980 * 512 * 4096
    assert found["advised"]["hit_rate"] > 0.9
    assert "  (no knee: " in flexkv("plan", path, *TOKEN).out


def test_a_disk_that_its_own_replay_does_not_fill_is_not_advised(
    flexkv: Flexkv, tmp_path: Path
) -> None:
    """Blocks for which memory has no room do not get to the disk."""
    path = repeated(tmp_path / "t", 20, 2000, 60)
    arguments = ["plan", path, *TOKEN, "--max-memory-gb", "0.2"]
    found = flexkv(*arguments, "--json").json
    assert found["admissions"]
    assert "ssd_cache_gb" not in found["settings"]
    out = flexkv(*arguments).out
    assert "  (no disk: one of 3.9 GiB added " in out
    assert "  (a request takes up to 3.91 GiB; " in out


@pytest.fixture
def any_of_40(tmp_path: Path) -> Path:
    """During a day, any of 40 prompts of a block each minute."""
    draw = random.Random(1)
    line = {"input_length": 513, "output_length": 1}
    rows = (line | {"timestamp": 60_000 * i, "hash_ids": [draw.randrange(40)]} for i in range(1441))
    path = tmp_path / "t"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def test_the_endurance_of_the_drive_limits_what_is_written(flexkv: Flexkv, any_of_40: Path) -> None:
    block = 512 * 4096
    arguments = [
        *("plan", any_of_40, *TOKEN, "--max-memory-gb", 10 * block / (1 << 30)),
        *("--max-disk-gb", 30 * block / (1 << 30), "--policies", "lru", "--json"),
    ]
    found = flexkv(*arguments).json
    assert {each["written_bytes"] for each in found["admissions"]} <= {0, 30 * block}
    assert any(each["refused_bytes"] for each in found["admissions"])
    more = flexkv(*arguments, "--drive-writes-per-day", "2.5").json
    assert max(each["written_bytes"] for each in more["admissions"]) == 75 * block


def test_writes_of_seconds_are_not_scaled_to_a_day(flexkv: Flexkv, tmp_path: Path) -> None:
    path = repeated(tmp_path / "t", 20, 100, 1)
    found = flexkv("plan", path, *TOKEN, "--json").json
    assert found["sizes"][-1]["written_bytes"] == 100 * 512 * 4096
    assert {each["written_bytes_day"] for each in found["sizes"]} == {None}
    out = flexkv("plan", path, *TOKEN).out
    assert "19.0 s are too short to scale" in out
    assert "GiB/day" not in out
    longer = flexkv("plan", repeated(tmp_path / "t", 20, 100, 60), *TOKEN).out
    assert "(writes are those of 19.0 min, scaled to a day)" in longer


def test_a_sample_is_marked(flexkv: Flexkv, tmp_path: Path) -> None:
    rows = (
        {
            "timestamp": 1000 * i,
            "input_length": 2049,
            "output_length": 1,
            "hash_ids": [1, 10 * (i % 900), 10 * (i % 900) + 1, 10 * (i % 900) + 2],
        }
        for i in range(6000)
    )
    path = tmp_path / "t"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    arguments = ["plan", path, *TOKEN, "--admissions", "none"]
    assert "~" not in flexkv(*arguments).out
    assert (
        "  (~ estimated by conversations with " in flexkv(*arguments, "--replay-blocks", "2000").out
    )


def found_tokens() -> int:
    return 30 * 2049 + 40 * 513


def test_the_tables_are_for_people(flexkv: Flexkv, trace: Path) -> None:
    ended = flexkv("plan", trace, *TOKEN)
    assert ended.code == 0
    assert ended.err == ""
    lines = ended.out.splitlines()
    (knee,) = (line for line in lines if line.endswith("knee"))
    assert knee.split()[:2] == ["0.00781", "72.4"]
    assert any(line.startswith("  cpu_cache_gb: 0.008") for line in lines)
    assert "saved" in ended.out


def test_auto_is_advised_where_it_hits_most(flexkv: Flexkv, tmp_path: Path) -> None:
    """Chats behind one system prompt, of which LRU keeps the ends of those that have ended."""
    requests = chats(1, 1500).requests
    rows = (
        {
            "timestamp": round(1000 * each.seconds),
            "input_length": each.prompt_tokens,
            "output_length": each.output_tokens,
            "hash_ids": list(each.blocks),
        }
        for each in requests
    )
    path = tmp_path / "t"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    memory = ["--max-memory-gb", 3000 * 16 * 4096 / (1 << 30), "--max-disk-gb", "0"]
    ended = flexkv("plan", path, *TOKEN, *memory)
    assert "  eviction_policy: auto\n" in ended.out
    assert f"  (auto is {FOLLOWING} under vLLM's connector" in ended.out
    (marked,) = (line.split()[0] for line in ended.out.splitlines() if line.endswith("  auto"))
    assert marked == FOLLOWING
    found = flexkv("plan", path, *TOKEN, *memory, "--policies", "lru", "--json").json
    assert found["settings"]["eviction_policy"] == "lru"


def test_limits_of_the_machine_are_kept(flexkv: Flexkv, trace: Path) -> None:
    gib = 2 * 512 * 4096 / (1 << 30)
    found = flexkv(
        "plan", trace, *TOKEN, "--max-memory-gb", gib, "--max-disk-gb", "0", "--json"
    ).json
    assert {each["memory_bytes"] for each in found["policies"]} == {2 * 512 * 4096}
    assert found["admissions"] == []
    assert found["settings"]["cpu_cache_gb"] == gib
    assert "ssd_cache_gb" not in found["settings"]


def test_sizes_that_are_asked_for_are_shown(flexkv: Flexkv, trace: Path) -> None:
    gib = 512 * 4096 / (1 << 30)
    found = flexkv("plan", trace, *TOKEN, "--memory-gb", f"{7 * gib},{11 * gib}", "--json").json
    assert {7, 11} <= {each["blocks"] for each in found["sizes"]}


def test_room_that_stays_empty_costs_no_memory(flexkv: Flexkv, trace: Path) -> None:
    """An index of a million GiB would take terabytes."""
    arguments = ["--memory-gb", "0,1000000", "--engine-gb", "0.001", "--json"]
    found = flexkv("plan", trace, *TOKEN, *arguments).json
    assert found["sizes"][-1]["bytes"] == pytest.approx(1e6 * (1 << 30))
    for policy in found["sizes"][-1]["policies"]:
        assert policy["hit_rate"] == pytest.approx(found["most"]["hit_rate"])


def test_only_what_is_named_is_compared(flexkv: Flexkv, trace: Path) -> None:
    found = flexkv(
        "plan", trace, *TOKEN, "--policies", FOLLOWING, "--admissions", "none", "--json"
    ).json
    assert [each["policy"] for each in found["policies"]] == [FOLLOWING]
    assert found["admissions"] == []
    assert found["settings"]["eviction_policy"] == "auto"


def test_a_trace_of_which_nothing_comes_back_says_so(flexkv: Flexkv, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text('{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1]}')
    ended = flexkv("plan", path, *TOKEN)
    assert ended.code == 0
    assert "No prefix comes back" in ended.out
    found = flexkv("plan", path, *TOKEN, "--json").json
    assert found["settings"] == {}


def test_an_engine_that_keeps_all_itself_is_not_said_to_see_no_prefix_again(
    flexkv: Flexkv, trace: Path
) -> None:
    ended = flexkv("plan", trace, *TOKEN, "--engine-gb", "1000")
    assert ended.code == 0
    assert "own cache hits all that comes back" in ended.out
    assert "No prefix comes back" not in ended.out


def test_a_model_says_nothing_to_the_terminal(flexkv: Flexkv, trace: Path, tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"model_type": "\x1b]0;owned\x07"}))
    ended = flexkv("plan", trace, "--model", file)
    assert ended.code == 0
    assert "(?]0;owned?)" in ended.out


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_curves_are_drawn(flexkv: Flexkv, trace: Path, tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"curve.{ending}"
    ended = flexkv("plan", trace, *TOKEN, "--prefill-rate", "1000", "--plot", path)
    assert (ended.code, ended.err) == (0, "")
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in head


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_comes_through_standard_input(trace: Path, packed: bool) -> None:
    data = trace.read_bytes()
    data = gzip.compress(data) if packed else data
    found = command.run("plan", "-", *TOKEN, "--json", stdin=data).json
    assert found["trace"]["name"] == "standard input"
    assert found["trace"]["requests"] == 70


def test_what_is_skipped_is_counted_by_reason(flexkv: Flexkv, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(f'{{"prompt_token_ids": {[1] * 40}}}\n{{"prompt_token_ids": []}}\n')
    ended = flexkv("plan", path, *TOKEN)
    assert "  skipped   1 request without token ids" in ended.out


@pytest.mark.parametrize(
    ("unit", "says"),
    [
        ("s", " prompt tokens a second\n"),
        ("ms", " a second: is the unit of time right? See --time-unit\n"),
        ("auto", " a second: is the unit of time right? See --time-unit\n"),
    ],
)
def test_an_absurd_rate_is_said(flexkv: Flexkv, tmp_path: Path, unit: str, says: str) -> None:
    rows = (
        {"timestamp": i, "input_length": 512, "output_length": 1, "hash_ids": [i % 9]}
        for i in range(1001)
    )
    path = tmp_path / "t"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert says in flexkv("plan", path, *TOKEN, "--time-unit", unit).out


def test_starts_that_are_made_are_said(flexkv: Flexkv, tmp_path: Path) -> None:
    request = {"t": 1.5, "type": "s", "in": 128, "out": 5, "hash_ids": [1, 2]}
    session = {"id": "a", "block_size": 64, "requests": [request, request | {"t": 60.0}]}
    path = tmp_path / "t"
    path.write_text(json.dumps(session, indent=1))
    ended = flexkv("plan", path, *TOKEN, "--sessions-per-hour", "8")
    assert "  starts    of 1 sessions are not in the file" in ended.out


def test_steps_without_a_terminal_are_lines_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with plan.shown_progress() as show:
        show("reading the trace", 0.5)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(plan, "QUIET_SECONDS", 0.0)
        show("reading the trace", 0.75)
        show("one pass", None)
    assert (
        capsys.readouterr().err == "flexkv plan: reading the trace: 75 %\nflexkv plan: one pass\n"
    )


BAD = {
    "no trace": [],
    "two traces": ["{trace}", "{trace}", *TOKEN],
    "no such file": ["{folder}/none", *TOKEN],
    "a directory": ["{folder}", *TOKEN],
    "a fifo": ["{folder}/fifo", *TOKEN],
    "an empty file": ["{folder}/empty", *TOKEN],
    "another kind of file": ["{folder}/binary", *TOKEN],
    "broken gzip": ["{folder}/broken.gz", *TOKEN],
    "a broken line": ["{folder}/broken", *TOKEN],
    "the wrong format": ["{trace}", "--format", "flexkv", *TOKEN],
    "an unknown format": ["{trace}", "--format", "csv", *TOKEN],
    "an unknown unit": ["{trace}", "--time-unit", "minutes", *TOKEN],
    "no sessions": ["{trace}", "--sessions-per-hour", "0", *TOKEN],
    "starts of sessions that the trace has": ["{trace}", "--sessions-per-hour", "5", *TOKEN],
    "empty standard input": ["-", *TOKEN],
    "no size of a token": ["{trace}"],
    "two sizes of a token": ["{trace}", "--model", "{folder}/config.json", *TOKEN],
    "no such model": ["{trace}", "--model", "{folder}/none"],
    "a model that says nothing": ["{trace}", "--model", "{folder}/config.json"],
    "an unknown dtype": ["{trace}", "--kv-dtype", "int3", *TOKEN],
    "a token of no bytes": ["{trace}", "--token-bytes", "0"],
    "another size of blocks": ["{trace}", "--block-tokens", "100", *TOKEN],
    "blocks of no tokens": ["{trace}", "--block-tokens", "0", *TOKEN],
    "a size that is no number": ["{trace}", "--memory-gb", "1,big", *TOKEN],
    "a limit that is no number": ["{trace}", "--max-memory-gb", "nan", *TOKEN],
    "a limit of less than a block": ["{trace}", "--max-memory-gb", "0.001", *TOKEN],
    "a negative limit": ["{trace}", "--max-disk-gb", "-1", *TOKEN],
    "a negative engine": ["{trace}", "--engine-gb", "-1", *TOKEN],
    "an infinite rate": ["{trace}", "--prefill-rate", "inf", *TOKEN],
    "an unknown policy": ["{trace}", "--policies", "lru,mru", *TOKEN],
    "a policy twice": ["{trace}", "--policies", "lru,lru", *TOKEN],
    "an unknown admission": ["{trace}", "--admissions", "never", *TOKEN],
    "no blocks to replay": ["{trace}", "--replay-blocks", "0", *TOKEN],
    "a drive that takes no writes": ["{trace}", "--drive-writes-per-day", "0", *TOKEN],
    "a load that never ends": ["{trace}", "--load-rate", "0", *TOKEN],
    "a disk that is no number": ["{trace}", "--disk-rate", "fast", *TOKEN],
    "a picture of no kind": ["{trace}", "--plot", "{folder}/curve.txt", *TOKEN],
    "a picture nowhere": ["{trace}", "--plot", "{folder}/none/curve.png", *TOKEN],
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error(
    flexkv: Flexkv, trace: Path, tmp_path: Path, case: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "empty").touch()
    (folder / "binary").write_bytes(b"\xff\xfe" + bytes(range(256)))
    (folder / "broken.gz").write_bytes(b"\x1f\x8b" + b"x" * 50)
    (folder / "broken").write_text(trace.read_text() + "{oops\n")
    (folder / "config.json").write_text("{}")
    arguments = [each.format(trace=trace, folder=folder) for each in BAD[case]]
    ended = flexkv("plan", *arguments)
    assert ended.code == 2
    assert ended.out == ""
    if "usage: " not in ended.err:
        assert ended.err.count("\n") == 1
        assert "; allowed: " in ended.err
