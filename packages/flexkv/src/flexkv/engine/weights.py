# SPDX-License-Identifier: Apache-2.0
"""Identifies the weights of a model or LoRA adapter by a small part of what its files contain, not
by where or since when they lie there."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

_DIGEST_BYTES = 16
_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"}
"""Endings of the files from which engines read weights."""

_PROCESSORS = "*processor_config.json"
"""Files by which engines prepare images, video and sound for a model."""

_TOKENIZER = "tokenizer.json"
"""File by which engines normalize tokens. Some models look up embeddings by normalized tokens."""

_CODE = "*.py"
_QUANTIZATION = "*quant*.json"
"""Files of a model with code, and with settings of its quantization."""

_READ_SAFETENSORS = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"}
)
"""Engines' names of formats that read the safetensors files of a folder, if it has some."""

_ADAPTERS = "adapter_config.json"
"""File with the rank, the scale and the target modules of a LoRA adapter, beside its weights."""

_BLOB = re.compile(r"[0-9a-f]{64}")
"""Name of a large file in the Hugging Face cache: its SHA-256."""

_DOWNLOADS = Path(".cache", "huggingface", "download")
"""Where `hf download --local-dir` keeps notes of the files: commit, digest, and time in seconds."""

_END_BYTES = 1024
"""Bytes that are read at both ends of a file."""
_SAMPLE_BYTES = 4096
_SAMPLE_STEP = 16 << 20
"""Bytes of a sample, and from one sample to the next. Each tensor of a safetensors file has a
sample of its own beside these: a file of 5 GB has about 300 samples and 30 tensors."""
_EMBEDDINGS = re.compile(r"embed|wte", re.IGNORECASE)
"""In the name of a tensor: training may change a few of its rows alone, those of new tokens."""
_MOST_HEADER_BYTES = 100_000_000
"""The longest header that the safetensors format allows."""
_READERS = 16
"""Files that are sampled at once. Each read waits for a disk or for a network."""

_NAMES_OF_PLACES = frozenset({"_name_or_path", "_commit_hash"})
"""Entries of a model's configuration that say where it came from."""


def weight_files(model: str, revision: str | None) -> list[Path]:
    """Files with the weights of a model, which is a path or a name in the Hugging Face cache; empty
    if there are none on this machine."""
    path = _folder_of(model, revision)
    return [] if path is None else weights_in(path)


def weight_traits(model: str, revision: str | None, load_format: str) -> list[str]:
    """Name the weights of a model and the way in which an engine reads them, each `NAME: VALUE`.
    `load_format` is the engine's name of the format; formats that read the same safetensors files
    of a folder are one. Raises OSError if a file cannot be read."""
    if load_format == "dummy":
        return ["load format: dummy"]
    files = weight_files(model, revision)
    top = min((len(file.parts) for file in files), default=0)
    read = [f for f in files if f.suffix == ".safetensors" and len(f.parts) == top]
    # vLLM's `auto` prefers Mistral's own files, whose heads have another order.
    if load_format in _READ_SAFETENSORS and read and not any(map(_is_mistrals, read)):
        files, load_format = read, "safetensors"
    where = [] if files else [f"model: {model}", f"revision: {revision}"]
    return [f"weights: {digest(file_stamps(files))}", f"load format: {load_format}", *where]


def code_traits(model: str, revision: str | None, *, runs_code: bool) -> list[str]:
    """Name the files beside a model's weights that decide what the weights compute: settings of its
    quantization, and code of the model if the engine runs that."""
    path = _folder_of(model, revision)
    if path is None or not path.is_dir():
        return []
    files = sorted(path.glob(_QUANTIZATION)) + (sorted(path.rglob(_CODE)) if runs_code else [])
    return [f"code: {digest(file_digests(files))}"] if files else []


def _is_mistrals(file: Path) -> bool:
    return file.name.startswith("consolidated")


def processor_files(model: str, revision: str | None) -> list[Path]:
    """Files by which a model's images, video and sound are prepared; empty if there are none on
    this machine."""
    return _glob(model, revision, _PROCESSORS)


def tokenizer_files(model: str, revision: str | None) -> list[Path]:
    """The file of a tokenizer in the folder of a model, in a list; empty if it is not there."""
    return _glob(model, revision, _TOKENIZER)


def _glob(model: str, revision: str | None, pattern: str) -> list[Path]:
    path = _folder_of(model, revision)
    return [] if path is None else sorted(path.glob(pattern))


def _folder_of(model: str, revision: str | None) -> Path | None:
    """The path of a model, or its folder in the Hugging Face cache; None if it is not there."""
    path = Path(model)
    if path.exists():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except (ImportError, ValueError):
        return None
    return Path(found).parent if isinstance(found, str) else None


def weights_in(path: Path) -> list[Path]:
    """Files with weights in a directory, or the file itself."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in files if file.suffix in _SUFFIXES]


def file_stamps(files: Iterable[Path]) -> list[str]:
    """Describe each file by its name, its size and a mark of its contents. Links are followed.

    The mark is the SHA-256 of the file that the Hugging Face Hub gave for it, if the file is in the
    Hub's cache or was downloaded into a folder, and was not changed since. Other files are marked
    by a digest of samples: the first and the last KiB, 4 KiB from each 16 MiB, and of a safetensors
    file its header, its embeddings and 4 KiB from the middle of each other tensor. A file that was
    changed in place between its samples keeps its mark. Raises OSError if a file cannot be read.
    """
    named = list(files)
    with ThreadPoolExecutor(_READERS) as readers:
        marks = readers.map(_content, named)
        return [
            f"{file.name} {file.stat().st_size} {mark}"
            for file, mark in zip(named, marks, strict=True)
        ]


def adapter_stamps(path: Path) -> list[str]:
    """Describe the weights of a LoRA adapter, and the settings by which an engine applies them.
    `path` is that of its folder, or of the file with its weights. Empty if its weights are not on
    this machine. Raises OSError if a file cannot be read."""
    weights = file_stamps(weights_in(path)) if path.exists() else []
    return weights and [*weights, *file_digests(sorted(path.rglob(_ADAPTERS)))]


def file_digests(files: Iterable[Path]) -> list[str]:
    """Describe each small file by its name and a digest of its bytes, or raise OSError."""
    return [f"{file.name} {hashlib.blake2b(file.read_bytes()).hexdigest()}" for file in files]


def configuration_digest(text: str) -> str:
    """Name a model's configuration by its JSON, but for the entries that say where it lies."""

    def keep(entries: dict[str, object]) -> dict[str, object]:
        return {name: value for name, value in entries.items() if name not in _NAMES_OF_PLACES}

    return digest([json.dumps(json.loads(text, object_hook=keep), sort_keys=True)])


def text_of_file(path: object) -> str:
    """Name a small file by its bytes; anything that is no readable file by its name."""
    file = Path(str(path))
    try:
        # A pipe would block.
        if file.is_file():
            return hashlib.blake2b(file.read_bytes(), digest_size=_DIGEST_BYTES).hexdigest()
    except OSError:
        pass
    return str(path)


def _content(file: Path) -> str:
    known = _name_in_cache(file) or _name_of_download(file)
    if known:
        return known
    made = xxhash.xxh3_128()
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for offset, size in _samples(fd, file.suffix):
            made.update(os.pread(fd, size, offset))
    finally:
        os.close(fd)
    return made.hexdigest()


def _name_in_cache(file: Path) -> str:
    """The SHA-256 by which the Hugging Face cache names a file; empty for any other file."""
    blob = file.resolve()
    cached = file.is_symlink() and blob.parent.name == "blobs" and _BLOB.fullmatch(blob.name)
    # The cache links a blob once it is complete: one that changed later is not what its name says.
    if cached and os.stat(file).st_mtime_ns <= os.lstat(file).st_mtime_ns:
        return blob.name
    return ""


def _name_of_download(file: Path) -> str:
    """The SHA-256 that `hf download --local-dir` has noted for a file; empty if it has not, or if
    the file was changed since."""
    try:
        note = (file.parent / _DOWNLOADS / f"{file.name}.metadata").read_text(encoding="ascii")
        _, name, noted = note.split()
        unchanged = file.stat().st_mtime <= float(noted)
    except (OSError, ValueError):
        return ""
    return name if unchanged and _BLOB.fullmatch(name) else ""


def _samples(fd: int, suffix: str) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of the parts of an open file that its mark is made of."""
    size = os.fstat(fd).st_size
    yield 0, _END_BYTES
    yield max(0, size - _END_BYTES), _END_BYTES
    for offset in range(_SAMPLE_STEP // 2, size, _SAMPLE_STEP):
        yield offset, _SAMPLE_BYTES
    if suffix != ".safetensors":
        return
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > min(size, _MOST_HEADER_BYTES):
        return
    yield 8, length
    for name, begin, end in _tensors(os.pread(fd, length, 8)):
        start = 8 + length
        if not 0 <= begin <= end <= size - start:
            return
        if _EMBEDDINGS.search(name):
            for offset in range(begin, end, _SAMPLE_STEP):
                yield start + offset, min(_SAMPLE_STEP, end - offset)
        else:
            # The whole of a small tensor.
            yield max(0, start + (begin + end - _SAMPLE_BYTES) // 2), _SAMPLE_BYTES


def _tensors(header: bytes) -> list[tuple[str, int, int]]:
    """Name, begin and end of each tensor behind the header of a safetensors file; none if the
    header is not one."""
    try:
        entries = json.loads(header)
        return [
            (name, int(entry["data_offsets"][0]), int(entry["data_offsets"][1]))
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return []


def digest(parts: Iterable[str]) -> str:
    """Make one name of all `parts`, in their order: 32 hexadecimal digits."""
    made = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        data = part.encode()
        made.update(len(data).to_bytes(8, "little") + data)
    return made.hexdigest()
