# SPDX-License-Identifier: Apache-2.0
"""Identifies the weights of a model or LoRA adapter by its files, without reading them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

_DIGEST_BYTES = 16
_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"}
"""Endings of the files from which engines read weights."""

_PROCESSORS = "*processor_config.json"
"""Files by which engines prepare images, video and sound for a model."""

_ADAPTERS = "adapter_config.json"
"""File with the rank, the scale and the target modules of a LoRA adapter, beside its weights."""

_BLOB = re.compile(r"[0-9a-f]{64}")
"""Name of a large file in the Hugging Face cache: its SHA-256."""


def weight_files(model: str, revision: str | None) -> list[Path]:
    """Files with the weights of a model; empty if there are none on this machine.

    Args:
        model: a path, or a name in the Hugging Face cache.
        revision: revision of the name; None for the newest.
    """
    path = _folder_of(model, revision)
    return [] if path is None else weights_in(path)


def processor_files(model: str, revision: str | None) -> list[Path]:
    """Files by which a model's images, video and sound are prepared; empty if there are none on
    this machine.

    Args:
        model, revision: see `weight_files`.
    """
    path = _folder_of(model, revision)
    return [] if path is None else sorted(path.glob(_PROCESSORS))


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

    The mark is the digest by which the Hugging Face cache names the file, so that nodes that
    downloaded the same weights agree. Other files are marked by their time of change.

    Raises:
        OSError: a file cannot be examined.
    """
    return [f"{file.name} {file.stat().st_size} {_content(file)}" for file in files]


def adapter_stamps(path: Path) -> list[str]:
    """Describe the weights of a LoRA adapter, and the settings by which an engine applies them.
    Empty if its weights are not on this machine.

    Args:
        path: of the adapter's folder, or of the file with its weights.

    Raises:
        OSError: a file cannot be read.
    """
    weights = file_stamps(weights_in(path)) if path.exists() else []
    return weights and [*weights, *file_digests(sorted(path.rglob(_ADAPTERS)))]


def file_digests(files: Iterable[Path]) -> list[str]:
    """Describe each small file by its name and a digest of its bytes, which are read.

    Raises:
        OSError: a file cannot be read.
    """
    return [f"{file.name} {hashlib.blake2b(file.read_bytes()).hexdigest()}" for file in files]


def _content(file: Path) -> str:
    changed, blob = os.stat(file).st_mtime_ns, file.resolve()
    cached = file.is_symlink() and blob.parent.name == "blobs" and _BLOB.fullmatch(blob.name)
    # The cache links a blob once it is complete: one that changed later is not what its name says.
    if cached and changed <= os.lstat(file).st_mtime_ns:
        return blob.name
    return str(changed)


def digest(parts: Iterable[str]) -> str:
    """Make one name of all `parts`, in their order: 32 hexadecimal digits."""
    made = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        data = part.encode()
        made.update(len(data).to_bytes(8, "little") + data)
    return made.hexdigest()
