# SPDX-License-Identifier: Apache-2.0
"""Tokenizers for random models: of one token a word, for clients that send texts, and of one token
a byte, for grammars, which describe an answer letter by letter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
SPECIAL = (UNKNOWN, BEGIN, END)
"""Words that every such tokenizer begins with."""


_BYTES = 256
_PRINTED = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, _BYTES)}
"""Bytes that stand for themselves in a vocabulary of bytes. The others have the numbers of further
letters, in their order."""


def write_words(path: Path, count: int, special: Sequence[str] = SPECIAL) -> None:
    """Write a tokenizer of so many words into a model's folder: the special ones, then `w3`, `w4`,
    and so on, each by its number. Blanks separate words, but need not stand beside special ones."""
    words = [*special, *(f"w{number}" for number in range(len(special), count))]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": UNKNOWN}
    _write(path, special, {"pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model})


def write_bytes(path: Path, count: int) -> None:
    """Write a tokenizer of so many tokens into a model's folder: the special ones, the bytes, and
    words that no text has."""
    further = (chr(_BYTES + number) for number in range(_BYTES))
    letters = [chr(byte) if byte in _PRINTED else next(further) for byte in range(_BYTES)]
    words = [*SPECIAL, *letters]
    words += [f"w{number}" for number in range(len(words), count)]
    vocabulary = {word: number for number, word in enumerate(words)}
    step = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": UNKNOWN}
    _write(path, SPECIAL, {"pre_tokenizer": step, "decoder": step, "model": model})


def _write(path: Path, special: Sequence[str], parts: dict[str, Any]) -> None:
    added = [
        {
            "id": number,
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, word in enumerate(special)
    ]
    tokenizer = {"version": "1.0", "added_tokens": added, **parts}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNKNOWN,
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": UNKNOWN,
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
