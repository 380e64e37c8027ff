# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path

from flexkv.adapter.weights import (
    adapter_stamps,
    digest,
    file_digests,
    file_stamps,
    processor_files,
    weight_files,
)


def test_parts_of_a_digest_do_not_run_together() -> None:
    assert digest(["ab", "c"]) != digest(["a", "bc"])


def test_only_files_with_weights_count(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    weights = [tmp_path / "a.safetensors", tmp_path / "part" / "b.gguf"]
    for file in (*weights, tmp_path / "config.json"):
        file.touch()
    assert weight_files(str(tmp_path), None) == weights


def test_a_file_of_another_time_or_size_has_another_stamp(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    stamps = []
    for data, time in ((b"1", 1), (b"1", 2), (b"12", 2)):
        file.write_bytes(data)
        os.utime(file, ns=(time, time))
        stamps += file_stamps([file])
    assert len(set(stamps)) == 3


def test_nodes_that_downloaded_the_same_weights_agree(tmp_path: Path) -> None:
    files = []
    for node, blob in (("one", "a" * 64), ("other", "a" * 64), ("third", "b" * 64)):
        blobs, snapshot = tmp_path / node / "blobs", tmp_path / node / "snapshots" / "main"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        (blobs / blob).write_bytes(b"weights")
        os.utime(blobs / blob, ns=(len(files), len(files)))
        files.append(snapshot / "model.safetensors")
        files[-1].symlink_to(Path("..", "..", "blobs", blob))
    one, other, third = file_stamps(files)
    assert one == other != third
    # A blob that was changed in place is not what its name says any more.
    changed = os.lstat(files[0]).st_mtime_ns + 1
    os.utime(files[0], ns=(changed, changed))
    assert file_stamps(files[:1]) != [other]


def test_a_model_that_is_nowhere_has_no_files() -> None:
    assert weight_files("nobody/nothing", None) == []
    assert processor_files("nobody/nothing", None) == []


def test_the_files_of_a_processor_count_by_their_bytes(tmp_path: Path) -> None:
    names = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
    files = [tmp_path / name for name in names]
    for file in (*files, tmp_path / "config.json", tmp_path / "a.safetensors"):
        file.write_text("{}")
    assert processor_files(str(tmp_path), None) == files
    assert processor_files(str(files[0]), None) == []
    before = file_digests(files)
    os.utime(files[0], ns=(1, 1))
    assert file_digests(files) == before
    files[0].write_text("[]")
    assert file_digests(files) != before
    assert file_digests(files)[1:] == before[1:]


def test_an_adapter_is_its_weights_and_how_they_are_applied(tmp_path: Path) -> None:
    weights, settings = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    settings.write_text('{"lora_alpha": 16}')
    assert adapter_stamps(tmp_path) == []
    stamps = []
    for size, alpha in ((1, 16), (1, 16), (1, 32), (2, 32)):
        weights.write_bytes(b"w" * size)
        os.utime(weights, ns=(1, 1))
        settings.write_text(f'{{"lora_alpha": {alpha}}}')
        stamps.append(adapter_stamps(tmp_path))
    assert stamps[0] == stamps[1] != stamps[2] != stamps[3]
    assert adapter_stamps(weights) == stamps[3][:1]
    assert adapter_stamps(tmp_path / "elsewhere") == []
