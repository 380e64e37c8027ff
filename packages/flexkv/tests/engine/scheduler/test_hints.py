# SPDX-License-Identifier: Apache-2.0
"""Hints in the forms of other systems."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv.engine.scheduler.hints import HintResult
from flexkv.engine.scheduler.options import (
    NONE,
    OptionsReader,
    RequestOptions,
    Role,
    context_of,
    tenant_of,
)
from flexkv.figures.definitions import HINT_ACTIONS, HINTS, sample
from flexkv.figures.meter import Meter
from flexkv.types.changes import Medium

ACCEPTED, CLIPPED, EXPIRED, UNSUPPORTED = HintResult


def request(params: Any = None, **fields: Any) -> Any:
    extra = fields.pop("extra", None)
    sampling = SimpleNamespace(extra_args=extra)
    return SimpleNamespace(
        request_id="r", kv_transfer_params=params, sampling_params=sampling, **fields
    )


def envelope(*actions: tuple[str, Any]) -> Any:
    made = [SimpleNamespace(action_type=kind, payload=payload) for kind, payload in actions]
    return SimpleNamespace(actions=made)


@pytest.mark.parametrize(
    ("made", "session"),
    [
        (request(session_id="chat 7"), "chat 7"),
        (request({"flexkv.session": "mine"}, session_id="chat 7"), "mine"),
        (request({"session_id": "a"}), "a"),
        (request({"x-session-id": "a", "prompt_cache_key": "b"}), "a"),
        (request({"prompt_cache_key": "b"}), "b"),
        (request(extra={"prompt_cache_key": "b"}), "b"),
        (request(extra={"agentic_context": {"program_id": "p"}}, session_id=""), "p"),
        (request({"prompt_cache_key": 7, "session_id": None}, session_id=3), ""),
    ],
)
def test_the_name_of_the_conversation(made: Any, session: str) -> None:
    reader = OptionsReader()
    assert reader.of(made).session == session
    assert reader.hints == ({("session", ACCEPTED): 1} if session else {})
    assert reader.ignored == 0


def test_a_long_name_counts_by_its_hash() -> None:
    reader = OptionsReader()
    names = [reader.of(request(session_id="x" * 64 + end)).session for end in ("", "a", "b", "a")]
    assert names[0] == "x" * 64
    assert names[1] == names[3] != names[2]
    assert all(len(name) <= 64 for name in names)
    assert reader.of(request({"flexkv.session": "x" * 64 + "a"})).session == names[1]


def test_tenants_have_conversations_and_shares_of_their_own() -> None:
    contexts = set()
    for salt in (None, "a", "b"):
        made = request(session_id="same", cache_salt=salt, num_prompt_tokens=1)
        contexts.add(context_of(made, OptionsReader().of(made), 0).session)
    assert len(contexts) == 3
    assert tenant_of(request(cache_salt="a")) != tenant_of(request(cache_salt="b"))


def test_vllms_limits_of_tokens() -> None:
    reader = OptionsReader()
    params = {"max_load_tokens": 0, "max_offload_tokens": 32}
    assert reader.of(request(params)) == RequestOptions(max_load_tokens=0, max_store_tokens=32)
    own = {"flexkv.max_load_tokens": 64, "flexkv.max_store_tokens": 16}
    both = reader.of(request(params | own))
    assert both == RequestOptions(max_load_tokens=64, max_store_tokens=16)
    bad = {"max_load_tokens": -1, "max_offload_tokens": True}
    assert reader.of(request(bad)) == NONE
    assert reader.hints == {
        ("max_load_tokens", ACCEPTED): 2,
        ("max_store_tokens", ACCEPTED): 2,
        ("max_load_tokens", UNSUPPORTED): 1,
        ("max_store_tokens", UNSUPPORTED): 1,
    }
    # Under OffloadingConnector vLLM follows its limits itself.
    offloading = OptionsReader(own_tokens=False)
    assert offloading.of(request(params)) == NONE
    assert offloading.hints == {}


@pytest.mark.parametrize(
    ("ttl", "seconds", "result"),
    [
        (300, 300.0, ACCEPTED),
        (0.5, 0.5, ACCEPTED),
        ("5m", 300.0, ACCEPTED),
        ("1h", 3600.0, ACCEPTED),
        ("30", 30.0, ACCEPTED),
        ("2h", 3600.0, CLIPPED),
        (1e9, 3600.0, CLIPPED),
        (0, None, EXPIRED),
        (-3, None, EXPIRED),
        (True, None, UNSUPPORTED),
        ("soon", None, UNSUPPORTED),
        ("", None, UNSUPPORTED),
        (math.inf, None, UNSUPPORTED),
        ([], None, UNSUPPORTED),
        ("9" * 100, None, UNSUPPORTED),
    ],
)
def test_how_long_blocks_are_retained(ttl: Any, seconds: float | None, result: HintResult) -> None:
    for made in (
        request(kv_hints=envelope(("kv.retain", {"ttl": ttl}))),
        request(kv_hints=envelope(("kv.retain@1.0", {"ttl_seconds": ttl, "priority": 3}))),
        request(extra={"agentic_context": {"kv_retention_ttl_seconds": ttl}}),
    ):
        reader = OptionsReader()
        assert reader.of(made) == RequestOptions(retain_seconds=seconds)
        assert reader.hints == {("retain", result): 1}
    if seconds is not None and not isinstance(ttl, str):
        reader = OptionsReader()
        assert reader.of(request({"flexkv.retain_seconds": ttl})).retain_seconds == seconds
        assert reader.hints == {("retain", result): 1}
        assert reader.ignored == 0


@pytest.mark.parametrize(
    ("made", "priority", "result"),
    [
        (request({"flexkv.priority": 7}), 7, ACCEPTED),
        (request({"flexkv.priority": 101}), 100, CLIPPED),
        (request({"flexkv.priority": -(10**30)}), -100, CLIPPED),
        (request({"flexkv.priority": 0}, priority=5), 0, ACCEPTED),
        (request({"flexkv.priority": 3}, priority=5), 3, ACCEPTED),
        (request(priority=5), -5, ACCEPTED),
        (request(priority=-200), 100, CLIPPED),
        (request(priority=0), None, None),
        (request(priority="high"), None, None),
    ],
)
def test_the_priority_of_a_request(made: Any, priority: int | None, result: Any) -> None:
    reader = OptionsReader()
    options = reader.of(made)
    assert options.priority == priority
    assert reader.hints == ({} if result is None else {("priority", result): 1})
    assert reader.ignored == 0
    made.num_prompt_tokens = 1
    assert context_of(made, options, 0).priority == (priority or 0)


@pytest.mark.parametrize("value", [True, 1.5, "7", None])
def test_a_priority_is_a_whole_number(value: Any) -> None:
    reader = OptionsReader()
    assert reader.of(request({"flexkv.priority": value})) == NONE
    assert reader.ignored == 1


def test_an_engines_priority_counts_only_where_requests_may_set_one() -> None:
    reader = OptionsReader(allowed=("load",))
    assert reader.of(request(priority=5)) == NONE
    assert reader.hints == {("priority", UNSUPPORTED): 1}


def test_a_conversation_that_ends_does_not_return() -> None:
    for made in (
        request(kv_hints=envelope(("kv.release", {}))),
        request({"flexkv.release": True, "flexkv.returns": True}),
    ):
        options = OptionsReader().of(made)
        assert options.release
        assert options.returns is False
    made = request(extra={"agentic_context": {"expected_resume": True}})
    assert OptionsReader().of(made) == RequestOptions(returns=True)


DEMOTING = (
    request({"flexkv.demote": True}),
    request(kv_hints=envelope(("kv.demote@1.0", {}))),
    request(kv_hints=envelope(("kv.offload", {}))),
)


@pytest.mark.parametrize("made", DEMOTING)
def test_a_request_demotes_its_blocks_where_there_is_a_lower_tier(made: Any) -> None:
    reader = OptionsReader()
    reader.set_media((Medium.DISK,))
    assert reader.of(made) == RequestOptions(demote=True)
    assert reader.hints == {("demote", ACCEPTED): 1}


@pytest.mark.parametrize("made", DEMOTING)
def test_without_a_lower_tier_a_demotion_is_unsupported(made: Any) -> None:
    reader = OptionsReader()
    reader.set_media(())
    assert reader.of(made) == NONE
    assert reader.hints == {("demote", UNSUPPORTED): 1}
    assert reader.ignored == 0


def test_actions_that_flexkv_does_not_follow_are_counted() -> None:
    reader = OptionsReader()
    many = [("kv.retain", {"ttl": 5})] * 40
    made = envelope(
        ("kv.fetch@1.0", {}), ("kv.prefetch", None), ("x", {}), ("kv.retain", {}), *many
    )
    assert reader.of(request(kv_hints=made)) == RequestOptions(retain_seconds=5.0)
    unsupported = {
        action: n for (action, result), n in reader.hints.items() if result is UNSUPPORTED
    }
    assert unsupported == {"prefetch": 1, "other": 1, "retain": 1 + 40 - 12}
    assert reader.hints["retain", ACCEPTED] == 1
    assert reader.hints["fetch", ACCEPTED] == 1, "as for every queued request"


def test_a_hint_gets_no_more_than_settings_and_role_allow() -> None:
    reader = OptionsReader(allowed=("load",), role=Role(stores=False))
    made = request({"max_load_tokens": 5}, session_id="a", kv_hints=envelope(("kv.release", {})))
    assert reader.of(made) == RequestOptions(store=False)
    assert set(reader.hints) == {
        (action, UNSUPPORTED) for action in ("session", "max_load_tokens", "release")
    }
    assert reader.ignored == 0


def test_the_metric_has_every_action_and_result() -> None:
    reader, meter = OptionsReader(), Meter()
    reader.set_media(())
    reader.of(request({"max_load_tokens": 5}, kv_hints=envelope(("kv.demote", {}))))
    reader.put_counts(meter)
    assert meter.values[sample(HINTS.name, "max_load_tokens", "accepted")] == 1
    assert meter.values[sample(HINTS.name, "demote", "unsupported")] == 1
    assert {labels[1] for labels in HINTS.counted} == {each.value for each in HintResult}
    assert {labels[0] for labels in HINTS.counted} == set(HINT_ACTIONS)


KEYS = st.text(max_size=9) | st.sampled_from(
    ["session_id", "prompt_cache_key", "agentic_context", "program_id", "ttl", "max_load_tokens"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(KEYS, each, max_size=3),
)


@given(JSON, JSON, JSON, st.lists(st.tuples(st.sampled_from(["kv.retain", "x"]) | JSON, JSON)))
def test_no_hint_raises(params: Any, extra: Any, session: Any, actions: list[Any]) -> None:
    made = request(params, extra=extra, session_id=session, kv_hints=envelope(*actions))
    reader = OptionsReader()
    options = reader.of(made)
    assert options.retain_seconds is None or 0 < options.retain_seconds <= 3600
    assert len(options.session) <= 64
    assert {action for action, _ in reader.hints} <= set(HINT_ACTIONS)
