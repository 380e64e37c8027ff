# SPDX-License-Identifier: Apache-2.0
"""The script of the demo and its sizes."""

from __future__ import annotations

import pytest

from integration.demo.chat import Exchange, MistralChat
from integration.demo.plan import Plan, PlanError, make_plan
from integration.demo.text import load_text


@pytest.fixture(scope="module")
def chat() -> MistralChat:
    return MistralChat()


def plan(
    chat: MistralChat, *, users: int = 3, turns: int = 4, model_limit: int | None = None
) -> Plan:
    return make_plan(
        chat,
        load_text(None),
        users=users,
        turns=turns,
        text_tokens=2_000,
        answer_tokens=32,
        kv_conversations=1.5,
        model_limit=model_limit,
    )


def test_every_user_has_all_turns_and_an_own_beginning(chat: MistralChat) -> None:
    made = plan(chat, users=8, turns=9)
    assert (made.users, made.turns) == (8, 9)
    assert all(len(questions) == 9 for questions in made.questions.values())
    beginnings = {tuple(chat.prompt([], asked[0])[:16]) for asked in made.questions.values()}
    assert len(beginnings) == 8


def test_the_text_has_about_the_tokens_asked_for(chat: MistralChat) -> None:
    for questions in plan(chat).questions.values():
        assert 1_500 < chat.count(questions[0]) < 2_500


def test_no_conversation_outgrows_its_bound_and_one_comes_near(chat: MistralChat) -> None:
    made = plan(chat)
    lengths = []
    for questions in made.questions.values():
        past = [Exchange(question, [7] * 32) for question in questions[:-1]]
        lengths.append(len(chat.prompt(past, questions[-1])) + 32)
    assert max(lengths) <= made.conversation_tokens <= max(lengths) + 256


def test_the_engines_cache_holds_fewer_conversations_than_there_are(chat: MistralChat) -> None:
    made = plan(chat)
    assert made.conversations_in_kv == pytest.approx(1.5, abs=0.01)
    assert made.kv_tokens < made.users * made.conversation_tokens


def test_a_conversation_longer_than_the_models_context_is_refused(chat: MistralChat) -> None:
    with pytest.raises(PlanError) as caught:
        plan(chat, model_limit=1_024)
    assert "the model's context ends at 1,024" in str(caught.value)
    assert "allowed: --tokens up to" in str(caught.value)
