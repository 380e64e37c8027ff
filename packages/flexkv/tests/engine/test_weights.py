# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from flexkv.engine.weights import (
    adapter_stamps,
    code_traits,
    configuration_digest,
    digest,
    file_digests,
    file_stamps,
    processor_files,
    text_of_file,
    tokenizer_files,
    weight_files,
    weight_traits,
)


def test_parts_of_a_digest_do_not_run_together() -> None:
    assert digest(["ab", "c"]) != digest(["a", "bc"])


def test_only_files_with_weights_count(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    weights = [tmp_path / "a.safetensors", tmp_path / "part" / "b.gguf"]
    for file in (*weights, tmp_path / "config.json"):
        file.touch()
    assert weight_files(str(tmp_path), None) == weights


def test_a_file_is_its_name_its_size_and_its_contents(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    stamps = []
    for data, time in ((b"1", 1), (b"1", 2), (b"2", 2), (b"12", 2)):
        file.write_bytes(data)
        os.utime(file, ns=(time, time))
        stamps += file_stamps([file])
    assert stamps[0] == stamps[1]
    assert len(set(stamps)) == 3
    renamed = file.rename(tmp_path / "b.safetensors")
    assert file_stamps([renamed]) != stamps[-1:]


def write_tensors(file: Path, sizes: Sequence[int], name: str = "t") -> list[int]:
    """Write a safetensors file with tensors of these sizes in bytes. Returns where each begins."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    begins = []
    for number, size in enumerate(sizes):
        begins.append(end)
        end += size
        offsets = [begins[-1], end]
        header[f"{name}{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": offsets}
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(end)
    file.write_bytes(content)
    return [8 + len(text) + begin for begin in begins]


def change(file: Path, offset: int) -> None:
    """Change one byte of a file and nothing else, as by a write in place."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(offset)
        (old,) = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([old ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_change_in_the_middle_of_any_tensor_shows(tmp_path: Path) -> None:
    """As where some layers alone were trained."""
    file = tmp_path / "model.safetensors"
    sizes = [1, 100_000, 3, 5000, 1, 64]
    begins = write_tensors(file, sizes)
    seen = {*file_stamps([file])}
    for begin, size in zip(begins, sizes, strict=True):
        change(file, begin + size // 2)
        seen |= {*file_stamps([file])}
    assert len(seen) == len(sizes) + 1


def test_any_row_of_the_embeddings_counts(tmp_path: Path) -> None:
    """As where new tokens alone were trained."""
    file = tmp_path / "model.safetensors"
    (begin,) = write_tensors(file, [20 << 20], "model.embed_tokens.weight")
    seen = {*file_stamps([file])}
    offsets = [5000, (16 << 20) - 1, 16 << 20, (20 << 20) - 2000]
    for offset in offsets:
        change(file, begin + offset)
        seen |= {*file_stamps([file])}
    assert len(seen) == len(offsets) + 1


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("offset", [0, 1023, 8 << 20, (24 << 20) + 4095, -1024, -1])
def test_ends_and_samples_of_any_file_count(tmp_path: Path, suffix: str, offset: int) -> None:
    file = tmp_path / f"model.{suffix}"
    size = 30 << 20
    with file.open("wb") as opened:
        opened.truncate(size)
    before = file_stamps([file])
    change(file, offset % size)
    assert file_stamps([file]) != before


def test_the_header_of_a_file_counts(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_tensors(file, [1] * 100)
    before = file_stamps([file])
    change(file, file.read_bytes().index(b"U8", 2000))  # and no place of a tensor
    assert file_stamps([file]) != before


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"t": {}}',
        b'{"t": {"data_offsets": [1]}}',
        b'{"t": {"data_offsets": [-9, 1e30]}}',
        b'{"embed": {"data_offsets": [-9, 1]}}',
        b"",
    ],
)
def test_a_damaged_header_is_sampled_all_the_same(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"x" * 100)
    before = file_stamps([file])
    change(file, 50)
    assert file_stamps([file]) != before


def test_where_a_model_lies_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "M"
    model.mkdir()
    write_tensors(model / "model.safetensors", [100, 7])
    (tmp_path / "link").symlink_to(model)
    shutil.copytree(model, tmp_path / "download", copy_function=shutil.copy)
    os.utime(tmp_path / "download" / "model.safetensors", ns=(1, 1))
    monkeypatch.chdir(tmp_path)
    paths = [str(model), "M", "./M", "link", "download"]
    formats = ["auto", "safetensors", "runai_streamer"]
    assert len({tuple(weight_traits(p, None, f)) for p in paths for f in formats}) == 1
    change(tmp_path / "download" / "model.safetensors", -10 % 107)
    assert weight_traits("download", None, "auto") != weight_traits("M", None, "auto")


def test_files_that_an_engine_reads_only_in_other_formats_count_there(tmp_path: Path) -> None:
    """A full download may have more files than the one that an engine makes for itself."""
    write_tensors(tmp_path / "model.safetensors", [100])
    formats = ["auto", "pt"]
    before = [weight_traits(str(tmp_path), None, each) for each in formats]
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "consolidated.00.pth").write_bytes(b"weights")
    after = [weight_traits(str(tmp_path), None, each) for each in formats]
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert before[0] != before[1]


def test_files_of_mistral_are_another_format(tmp_path: Path) -> None:
    write_tensors(tmp_path / "consolidated.safetensors", [100])
    names = {tuple(weight_traits(str(tmp_path), None, each)) for each in ("auto", "hf")}
    assert len(names) == 2


def test_weights_elsewhere_are_named_by_their_place() -> None:
    names = {
        tuple(weight_traits(*each, "auto"))
        for each in (("nobody/nothing", None), ("nobody/other", None), ("nobody/other", "main"))
    }
    assert len(names) == 3


def test_code_counts_where_it_runs(tmp_path: Path) -> None:
    code, settings = tmp_path / "modeling.py", tmp_path / "hf_quant_config.json"
    found = []
    for text, quantized in (("1", "1"), ("2", "1"), ("2", "2")):
        code.write_text(text)
        settings.write_text(quantized)
        found.append([code_traits(str(tmp_path), None, runs_code=each) for each in (False, True)])
    one, other, third = found
    assert one[0] == other[0] != third[0]
    assert one[1] != other[1] != third[1]
    assert code_traits("nobody/nothing", None, runs_code=True) == []


def test_a_configuration_is_not_where_it_came_from() -> None:
    texts = [
        '{"layers": 1, "text_config": {"_name_or_path": "/a", "width": 2}, "_name_or_path": "/a"}',
        '{"_name_or_path": "/b", "layers": 1, "text_config": {"width": 2}, "_commit_hash": "1"}',
        '{"layers": 1, "text_config": {"width": 3}}',
    ]
    one, other, third = map(configuration_digest, texts)
    assert one == other != third


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


def test_a_download_into_a_folder_is_that_of_the_cache(tmp_path: Path) -> None:
    """As `hf download --local-dir` makes it, until the file is changed."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    os.utime(file, (1000, 1000))
    sampled = file_stamps([file])
    note = tmp_path / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"c0ffee\n{'a' * 64}\n1000.5\n")
    assert file_stamps([file]) == [f"model.safetensors 7 {'a' * 64}"]
    os.utime(file, (1001, 1001))
    assert file_stamps([file]) == sampled
    os.utime(file, (1000, 1000))
    for text in ("", f"c0ffee\n{'a' * 40}\n1000.5\n", f"c0ffee\n{'a' * 64}\nnever\n"):
        note.write_text(text)
        assert file_stamps([file]) == sampled


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


def test_a_tokenizer_is_its_file(tmp_path: Path) -> None:
    assert tokenizer_files(str(tmp_path), None) == []
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    assert tokenizer_files(str(tmp_path), None) == [tmp_path / "tokenizer.json"]


def test_only_the_bytes_of_a_file_stand_for_its_name(tmp_path: Path) -> None:
    """A pipe has none before somebody writes, and other texts may not even be names."""
    for name in ("one", "other"):
        (tmp_path / name).write_text("scales")
    assert text_of_file(tmp_path / "one") == text_of_file(str(tmp_path / "other")) != "scales"
    os.mkfifo(tmp_path / "pipe")
    for text in (str(tmp_path), str(tmp_path / "pipe"), str(tmp_path / "none"), "a\0b", "x" * 9999):
        assert text_of_file(text) == text


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
