# SPDX-License-Identifier: Apache-2.0
"""The long texts that the users talk about."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MIN_CHARACTERS = 2_000


class TextError(ValueError):
    """The text cannot be used; the message names the file and what is allowed."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text and what to call it in front of the reader."""

    name: str
    content: str

    def excerpts(self, count: int, characters: int) -> list[str]:
        """Cut `count` pieces of about `characters` characters that begin evenly spread.

        A piece begins at the start of a paragraph where there is one nearby. A text too short for
        pieces that do not overlap is read on from its beginning; no piece is longer than the text.
        """
        length = min(characters, len(self.content))
        endless = self.content + "\n\n" + self.content
        step = len(self.content) // count
        return [
            endless[start : start + length]
            for start in map(self._paragraph_at, range(0, count * step, step))
        ]

    def _paragraph_at(self, position: int) -> int:
        if position == 0:
            return 0
        found = self.content.find("\n\n", position, position + 2_000)
        return position if found < 0 else found + 2


def load_text(path: Path | None) -> Text:
    """Read the user's file, or without one the language reference that comes with Python.

    Raises:
        TextError: the file cannot be read, is no UTF-8 text or is too short.
    """
    if path is None:
        return _python_reference()
    allowed = f"a UTF-8 text file of at least {MIN_CHARACTERS:,} characters"
    try:
        content = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"cannot read {path} from --text: {error}; allowed: {allowed}") from None
    if len(content) < MIN_CHARACTERS:
        raise TextError(f"{path} from --text has {len(content):,} characters; allowed: {allowed}")
    return Text(path.name, content)


def _python_reference() -> Text:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise TextError(
            "this Python comes without its language reference (module pydoc_data): "
            "name a text of your own with --text FILE"
        ) from None
    # Longest chapters first, so that a user talks about one subject rather than about fifty.
    chapters = sorted(topics.values(), key=len, reverse=True)
    return Text("the Python language reference", "\n\n".join(chapters))
