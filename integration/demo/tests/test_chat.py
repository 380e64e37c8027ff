# SPDX-License-Identifier: Apache-2.0
"""Conversations become token ids that engines can reuse the beginning of."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.demo.chat import Exchange, HubChat, MistralChat
from integration.demo.engines import ModelError, hub_model
from integration.demo.tests.models import write_hub_model


@pytest.fixture(scope="module")
def mistral() -> MistralChat:
    return MistralChat()


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hub_model(tmp_path_factory.mktemp("hub"))


def test_mistral_prompts_are_those_of_its_own_encoder(mistral: MistralChat) -> None:
    from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    published = MistralTokenizer.v3()
    messages = [
        UserMessage(content="What is a lock?"),
        AssistantMessage(content="A thing with a key."),
        UserMessage(content="And a key?"),
    ]
    wanted = published.encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens
    answer = published.instruct_tokenizer.tokenizer.encode(
        "A thing with a key.", bos=False, eos=False
    )
    past = [Exchange("What is a lock?", answer)]
    assert mistral.prompt(past, "And a key?") == wanted


def test_a_mistral_conversation_continues_its_own_tokens(mistral: MistralChat) -> None:
    answer = [31_000, 5, 2, 77]  # not what an encoder would give, as from a random model
    first = mistral.prompt([], "One?")
    second = mistral.prompt([Exchange("One?", answer)], "Two?")
    assert second[: len(first) + len(answer)] == first + answer


def test_a_users_model_brings_its_own_tokenizer_and_template(hub_folder: Path) -> None:
    chat = HubChat(str(hub_folder))
    answer = chat.prompt([], "x")[1:-2]
    assert chat.decode(answer) == "x"
    tokens = chat.prompt([Exchange("Hi there", answer)], "And you?")
    user, assistant, end = (chat.prompt([], "x")[index] for index in (0, -1, -2))
    assert [token for token in tokens if token in (user, assistant, end)] == [
        user, end, assistant, end, user, end, assistant,
    ]  # fmt: skip


def test_an_answer_ends_before_its_end_token(hub_folder: Path) -> None:
    chat = HubChat(str(hub_folder))
    end = chat.prompt([], "x")[-2]
    assert chat.answer([300, 301, end, 302]) == [300, 301]
    assert chat.answer([300, 301]) == [300, 301]


def test_a_users_model_is_described(hub_folder: Path) -> None:
    from integration.harness.checkpoint import TINY

    model = hub_model(str(hub_folder), "float32")
    assert model.context == TINY.max_position
    assert model.kv_bytes_per_token == TINY.kv_bytes_per_token
    assert not model.random


def test_a_model_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = str(tmp_path / "no-model")
    with pytest.raises(ModelError) as caught:
        hub_model(missing, "auto")
    assert missing in str(caught.value)
    assert "allowed: the directory of a model" in str(caught.value)
