# SPDX-License-Identifier: Apache-2.0
"""What is said in the demo, and how large the engine's caches are for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import cycle, islice

from integration.demo.chat import Chat, Exchange
from integration.demo.text import Text

USERS = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gil", "Hana")
QUESTIONS = (
    "Summarise what I sent you in two sentences.",
    "Which terms does it define? List the three that matter most.",
    "What does it warn against, and why?",
    "Which part would you explain to a beginner first?",
    "Give one example of your own for the last point.",
    "What is missing from it?",
)
# Re-encoding a decoded answer, as a chat template does, may give more tokens than it had.
SPARE_TOKENS = 128


class PlanError(ValueError):
    """The conversation does not fit; the message names the value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The demo's script and sizes.

    Attributes:
        questions: per user the texts of all turns; the first one holds the long text.
        answer_tokens: tokens generated per turn.
        conversation_tokens: an upper bound of a whole conversation's tokens.
        kv_tokens: room in the engine's own KV cache.
    """

    questions: dict[str, list[str]]
    answer_tokens: int
    conversation_tokens: int
    kv_tokens: int

    @property
    def users(self) -> int:
        """Number of users."""
        return len(self.questions)

    @property
    def turns(self) -> int:
        """Turns of each user."""
        return len(next(iter(self.questions.values())))

    @property
    def conversations_in_kv(self) -> float:
        """How many whole conversations the engine's own KV cache has room for."""
        return self.kv_tokens / self.conversation_tokens


def make_plan(
    chat: Chat,
    text: Text,
    *,
    users: int,
    turns: int,
    text_tokens: int,
    answer_tokens: int,
    kv_conversations: float,
    model_limit: int | None,
) -> Plan:
    """Write the script.

    Args:
        text_tokens: about how many tokens of text each user brings.
        kv_conversations: how many whole conversations the engine's own KV cache has room for.
        model_limit: the longest context of the model in tokens; None if unknown.

    Raises:
        PlanError: a conversation is longer than the model's context.
    """
    sample = text.content[: 16 * text_tokens]
    characters = math.ceil(text_tokens * len(sample) / chat.count(sample))
    excerpts = text.excerpts(users, characters)
    questions = {
        name: _questions(name, excerpt, turns)
        for name, excerpt in zip(USERS, excerpts, strict=False)
    }
    longest = max(_tokens(chat, asked, answer_tokens) for asked in questions.values())
    if model_limit is not None and longest > model_limit:
        raise PlanError(
            f"a conversation of {turns} turns about {text_tokens:,} tokens of text takes up to "
            f"{longest:,} tokens, but the model's context ends at {model_limit:,}; allowed: "
            f"--tokens up to {max(0, text_tokens - (longest - model_limit)):,}"
        )
    return Plan(questions, answer_tokens, longest, math.ceil(kv_conversations * longest))


def _questions(name: str, excerpt: str, turns: int) -> list[str]:
    # The name comes first, so that no two conversations share a block even over the same text.
    first, *rest = islice(cycle(QUESTIONS), turns)
    opening = f"{name} here. Read the following text; I have questions about it."
    return [f"{opening}\n\n{excerpt}\n\n{first}", *rest]


def _tokens(chat: Chat, questions: list[str], answer_tokens: int) -> int:
    """Upper bound of the tokens of a conversation: its last prompt, and all its answers."""
    past = [Exchange(question, []) for question in questions[:-1]]
    prompt = len(chat.prompt(past, questions[-1]))
    return prompt + len(questions) * answer_tokens + SPARE_TOKENS
