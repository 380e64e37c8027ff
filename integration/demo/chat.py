# SPDX-License-Identifier: Apache-2.0
"""From a conversation to the token ids an engine is given, and back.

Two tokenizers, both published ones: that of the user's model with its own chat template, and for
the random model the one of Mistral-7B-Instruct-v0.3, which comes with a package vLLM requires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and the token ids of the answer it got."""

    question: str
    answer: list[int]


class Chat(Protocol):
    """Tokenizer and chat format of one model."""

    name: str

    def prompt(self, past: Sequence[Exchange], question: str) -> list[int]:
        """Token ids of the whole conversation so far, with the new question at its end."""

    def count(self, text: str) -> int:
        """Number of tokens of a text."""

    def answer(self, tokens: Sequence[int]) -> list[int]:
        """The part of a generation that is the answer: what comes before an end token."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of an answer, for people."""


class MistralChat:
    """Mistral's v3 tokenizer and instruct format, for a model with its vocabulary.

    The tokens of an answer go back into the conversation as they are: the random model answers
    with byte sequences that decoding and encoding would not give back.
    """

    name = "Mistral-7B-Instruct-v0.3"

    def __init__(self) -> None:
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

        self._chat: Any = MistralTokenizer.v3()
        self._tokenizer: Any = self._chat.instruct_tokenizer.tokenizer
        self.vocabulary = int(self._tokenizer.n_words)

    def prompt(self, past: Sequence[Exchange], question: str) -> list[int]:
        """See `Chat.prompt`."""
        tokens = [int(self._tokenizer.bos_id)]
        for exchange in past:
            tokens += self._instruction(exchange.question)
            tokens += [*exchange.answer, int(self._tokenizer.eos_id)]
        return tokens + self._instruction(question)

    def count(self, text: str) -> int:
        """See `Chat.count`."""
        return len(self._tokenizer.encode(text, bos=False, eos=False))

    def answer(self, tokens: Sequence[int]) -> list[int]:
        """See `Chat.answer`. A random model's end token means nothing: all is answer."""
        return list(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Chat.decode`."""
        return str(self._chat.decode(list(tokens)))

    def _instruction(self, text: str) -> list[int]:
        from mistral_common.protocol.instruct.messages import UserMessage
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        request = ChatCompletionRequest(messages=[UserMessage(content=text)])
        tokens: list[int] = self._chat.encode_chat_completion(request).tokens
        return tokens[1:]  # without the begin token, which only a conversation's start has


class HubChat:
    """Tokenizer and chat template of a model by its name on the Hub or its directory.

    Raises:
        OSError, ValueError: there is no such model, or no tokenizer with it.
    """

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._end = self._end_tokens(model)
        self.name = model

    def prompt(self, past: Sequence[Exchange], question: str) -> list[int]:
        """See `Chat.prompt`. As a chat server does it: from the texts, every turn anew."""
        messages = []
        for exchange in past:
            messages.append({"role": "user", "content": exchange.question})
            messages.append({"role": "assistant", "content": self.decode(exchange.answer)})
        messages.append({"role": "user", "content": question})
        if self._tokenizer.chat_template is None:
            text = "".join(f"{m['role'].title()}: {m['content']}\n\n" for m in messages)
            return list(self._tokenizer.encode(text + "Assistant:"))
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def count(self, text: str) -> int:
        """See `Chat.count`."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def answer(self, tokens: Sequence[int]) -> list[int]:
        """See `Chat.answer`."""
        ends = (place for place, token in enumerate(tokens) if token in self._end)
        return list(tokens[: next(ends, len(tokens))])

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Chat.decode`."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _end_tokens(self, model: str) -> set[int]:
        from transformers import GenerationConfig

        try:
            ends = GenerationConfig.from_pretrained(model).eos_token_id
        except OSError:  # the file is optional
            ends = None
        found = set(ends) if isinstance(ends, list) else {ends}
        return {int(end) for end in found | {self._tokenizer.eos_token_id} if end is not None}
