# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexkv.engine.choice.chooser import LoadMode
from flexkv.engine.scheduler.options import NONE, OptionsReader, RequestOptions, pin_owner
from flexkv.settings import load_config

NAMES = [f"flexkv.{each.name}" for each in dataclasses.fields(RequestOptions)]


def request(params: Any, request_id: str = "r") -> Any:
    return SimpleNamespace(request_id=request_id, kv_transfer_params=params)


def test_all_parameters() -> None:
    params = {
        "flexkv.load": False,
        "flexkv.store": False,
        "flexkv.max_load_tokens": 100,
        "flexkv.pin": True,
        "flexkv.pin_seconds": 2.5,
        "flexkv.pin_name": "me",
        "flexkv.unpin": True,
        "flexkv.load_mode": "layerwise",
        "flexkv.session": "chat 7",
        "flexkv.returns": True,
        "flexkv.max_store_tokens": 50,
        "flexkv.retain_seconds": 300,
        "flexkv.release": False,
        "flexkv.priority": -7,
        "flexkv.demote": True,
        "flexkv.announced_tokens": 96,
    }
    assert list(params) == NAMES
    reader = OptionsReader()
    assert reader.of(request(params)) == RequestOptions(
        *(False, False, 100, True, 2.5, "me", True, LoadMode.LAYERWISE, "chat 7", True, 50, 300.0),
        priority=-7,
        demote=True,
        announced_tokens=96,
    )
    assert reader.ignored == 0


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True, "load": 3, 4: 5}])
def test_what_is_not_ours_is_left_alone(params: Any, caplog: pytest.LogCaptureFixture) -> None:
    reader = OptionsReader()
    assert reader.of(request(params)) == NONE
    assert reader.ignored == 0
    assert caplog.records == []


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"flexkv.lod": True}, ["'flexkv.lod': True", "allowed: flexkv.load, flexkv.store"]),
        ({"flexkv.load": 1}, ["flexkv.load: 1", "allowed: true or false"]),
        ({"flexkv.pin": "yes"}, ["flexkv.pin: 'yes'", "allowed: true or false"]),
        ({"flexkv.pin_seconds": 0}, ["pin_seconds: 0", "a number above 0, up to 2592000"]),
        ({"flexkv.pin_seconds": True}, ["pin_seconds: True", "a number above 0"]),
        ({"flexkv.pin_seconds": 1e12}, ["pin_seconds: 1000000000000.0", "a number above 0"]),
        ({"flexkv.pin_seconds": float("nan")}, ["pin_seconds: nan", "a number above 0"]),
        ({"flexkv.pin_name": ""}, ["pin_name: ''", "a text of 1 to 64 characters"]),
        ({"flexkv.pin_name": "x" * 65}, ["pin_name: 'xxx", "a text of 1 to 64 characters"]),
        ({"flexkv.pin_name": 7}, ["pin_name: 7", "a text of 1 to 64 characters"]),
        ({"flexkv.max_load_tokens": -1}, ["max_load_tokens: -1", "a whole number from 0 on"]),
        ({"flexkv.max_load_tokens": True}, ["max_load_tokens: True", "a whole number"]),
        ({"flexkv.load_mode": "fast"}, ["load_mode: 'fast'", "async, layerwise, auto"]),
        ({"flexkv.load_mode": ["auto"]}, ["load_mode: ['auto']", "async, layerwise, auto"]),
        ({"flexkv.max_load_tokens": 1.5}, ["max_load_tokens: 1.5", "a whole number"]),
        ({"flexkv.store": "x" * 9999}, ["flexkv.store: 'xxx", "...", "true or false"]),
        ({"flexkv.\n": 0}, ["'flexkv.\\n': 0"]),
        ({"FlexKV.load": False}, ["'FlexKV.load': False", "allowed: flexkv.load, flexkv.store"]),
        ({"flexkv.LOAD": False}, ["'flexkv.LOAD': False", "allowed: flexkv.load"]),
        ({"flexkv.returns": "soon"}, ["flexkv.returns: 'soon'", "allowed: true or false"]),
        ({"flexkv.session": 3}, ["flexkv.session: 3", "a text that is not empty"]),
        ({"flexkv.session": ""}, ["flexkv.session: ''", "a text that is not empty"]),
        ({"flexkv.max_store_tokens": -1}, ["max_store_tokens: -1", "a whole number from 0 on"]),
        ({"flexkv.retain_seconds": 0}, ["retain_seconds: 0", "a number above 0; at most 3600"]),
        ({"flexkv.retain_seconds": "5m"}, ["retain_seconds: '5m'", "a number above 0"]),
        ({"flexkv.retain_seconds": True}, ["retain_seconds: True", "a number above 0"]),
        ({"flexkv.release": 1}, ["flexkv.release: 1", "allowed: true or false"]),
        ("nonsense", ["is 'nonsense'", "allowed: a dictionary"]),
    ],
)
def test_one_line_names_what_is_wrong(
    params: Any, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    reader = OptionsReader()
    assert reader.of(request(params)) == NONE
    assert reader.ignored == 1
    (record,) = caplog.records
    message = record.getMessage()
    assert "request r " in message
    assert [phrase for phrase in said if phrase not in message] == []
    assert "\n" not in message
    assert len(message) < 400


def test_a_request_has_one_line_however_much_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    reader = OptionsReader()
    reader.of(request({f"flexkv.{number}": 0 for number in range(10_000)}))
    assert reader.ignored == 10_000
    (record,) = caplog.records
    assert "'flexkv.0': 0, which is ignored, like 9999 more; allowed" in record.getMessage()
    reader.of(request({"flexkv.load": "no"}, "other"))
    assert "request other has flexkv.load: 'no', which is ignored; allowed" in caplog.messages[1]


def test_what_is_right_beside_it_counts() -> None:
    options = OptionsReader().of(request({"flexkv.pin": True, "flexkv.load": None, "flexkv.x": 1}))
    assert options == RequestOptions(pin=True)


def test_what_the_settings_do_not_allow_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    params = {"flexkv.pin": True, "flexkv.store": False, "flexkv.session": "mine"}
    reader = OptionsReader(
        load_config({"request_options": "store, load"}, environ={}).request_options
    )
    assert reader.of(request(params)) == RequestOptions(store=False)
    assert reader.ignored == 2
    assert caplog.messages == [
        "kv_transfer_params of request r has 'flexkv.pin': True, which is ignored, like 1 more; "
        "allowed: flexkv.load, flexkv.store (setting request_options)"
    ]
    assert OptionsReader(()).of(request(params)) == NONE
    assert "allowed: none (setting request_options)" in caplog.messages[1]


def test_requests_pin_nothing_unless_a_setting_allows_it() -> None:
    pins = {name: True for name in NAMES if "pin" in name}
    default = load_config({}, environ={}).request_options
    for params in (dict.fromkeys(pins, True), {"flexkv.pin_seconds": 9, "flexkv.pin_name": "a"}):
        reader = OptionsReader(default)
        assert reader.of(request(params)) == NONE
        assert reader.ignored == len(params)
    every = load_config({"request_options": "all"}, environ={}).request_options
    assert [f"flexkv.{each}" for each in sorted(every)] == sorted(NAMES)
    assert set(default) == {each for each in every if "pin" not in each}


def test_the_log_is_not_flooded(caplog: pytest.LogCaptureFixture) -> None:
    reader = OptionsReader()
    for number in range(1000):
        reader.of(request({f"flexkv.{number}": 0}, str(number)))
    assert reader.ignored == 1000
    assert len(caplog.records) == 100


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda each: st.lists(each) | st.dictionaries(st.text(), each),
    )
    | st.dictionaries(
        st.sampled_from([*NAMES, "flexkv.", "x"]),
        st.none() | st.booleans() | st.integers() | st.text(),
    )
)
def test_nothing_raises(params: Any) -> None:
    options = OptionsReader().of(request(params))
    assert isinstance(options.load, bool)
    assert options.max_load_tokens is None or options.max_load_tokens >= 0
    assert options.load_mode is None or options.load_mode in LoadMode


def test_a_cache_salt_has_pins_of_its_own() -> None:
    owners = {
        pin_owner(SimpleNamespace(cache_salt=salt), RequestOptions(pin_name=name))  # type: ignore[arg-type]
        for salt in ("a", "b", "", None)
        for name in ("", "b")
    }
    assert len(owners) == 6, "no salt is the empty one"
