# SPDX-License-Identifier: Apache-2.0
"""What must hold for every setting, from every source."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flexkv import CacheConfig, ConfigError, KVLayout, TensorView, load_config, open_cache
from flexkv.settings import SETTINGS
from flexkv.settings.setting import Setting

VALUES = (
    0.5,
    7,
    "on",
    "none",
    "/a",
    ("/a", "/b"),
    "host:1",
    "http://host/path",
    "s3://bucket/path",
)
"""Each kind takes at least one of them, unless it has names of its own."""
BAD = "no such value!"
LAYOUT = KVLayout.from_tensors([TensorView.of("a", np.zeros((2, 4096), np.int8))], 2)

Given = tuple[dict[str, Any], dict[str, str]]
"""Settings of the engine, and the environment."""


def by_engine(setting: Setting, value: Any, folder: Path) -> Given:
    return {setting.name: value}, {}


def by_environment(setting: Setting, value: Any, folder: Path) -> Given:
    return {}, {setting.variable: value if isinstance(value, str) else setting.written(value)}


def by_yaml(setting: Setting, value: Any, folder: Path) -> Given:
    return by_file(folder / "flexkv.yaml", yaml.safe_dump({setting.name: value}))


def by_json(setting: Setting, value: Any, folder: Path) -> Given:
    return by_file(folder / "flexkv.json", json.dumps({setting.name: value}))


def by_file(path: Path, text: str) -> Given:
    path.write_text(text)
    return {}, {"FLEXKV_CONFIG_PATH": str(path)}


SOURCES: dict[str, Callable[[Setting, Any, Path], Given]] = {
    "the engine": by_engine,
    "environment variable": by_environment,
    "flexkv.yaml": by_yaml,
    "flexkv.json": by_json,
}


def load(setting: Setting, value: Any, source: str, folder: Path, **beside: Any) -> CacheConfig:
    extra, environ = SOURCES[source](setting, value, folder)
    return load_config(beside | extra, "the engine", environ)


def accepted(setting: Setting) -> list[Any]:
    """Those of `VALUES` that the setting takes, as it reads them, or else its default."""
    found = []
    for value in VALUES:
        with contextlib.suppress(ValueError):
            found.append(setting.kind.parse(value))
    return found or [setting.default]


def forms(setting: Setting, value: Any) -> list[Any]:
    """How users write the value: as a text, and as JSON has it, with lists for tuples."""
    text = setting.written(value)
    return [json.loads(json.dumps(value)), *([text] if text else [])]


every_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda each: each.name)
every_source = pytest.mark.parametrize("source", SOURCES)


@every_setting
@every_source
def test_a_default_comes_back_from_every_source(
    setting: Setting, source: str, tmp_path: Path
) -> None:
    for form in forms(setting, setting.default):
        assert load(setting, form, source, tmp_path) == CacheConfig()


@every_setting
@every_source
def test_a_value_comes_back_from_every_source(
    setting: Setting, source: str, tmp_path: Path
) -> None:
    beside = {setting.needs: accepted(SETTINGS[setting.needs])[0]} if setting.needs else {}
    for value in accepted(setting):
        for form in forms(setting, value):
            config = load(setting, form, source, tmp_path, **beside)
            assert config == CacheConfig(**beside | {setting.name: value})


ODD = (
    *(" ", "nan", "inf", "-1", "1e400", "1_6", "0x10", "5GB", "true", "None", "null", "[]", "{}"),
    *(
        "1,2",
        "../x",
        "0",
        "-0",
        "99999999999999999999",
        "~",
        "$HOME",
        "\N{LATIN SMALL LETTER E WITH ACUTE}",
    ),
    *("'1'", "1;2", "yes", "http://", "s3://", "file://", "://", ":50051", "a:b:c", "a:99999"),
)
"""What people write where something else is meant, or by mistake."""


@every_setting
@pytest.mark.parametrize("odd", ODD)
def test_an_odd_text_is_taken_or_refused_in_one_clear_line(setting: Setting, odd: str) -> None:
    try:
        config = load_config(environ={setting.variable: odd})
    except ConfigError as error:
        text = str(error)
        assert "\n" not in text
        assert repr(odd) in text
        assert setting.variable in text
        assert "allowed: " in text
    else:
        assert getattr(config, setting.name) is not None or setting.default is None


@every_setting
@every_source
def test_an_error_names_value_source_and_what_is_allowed(
    setting: Setting, source: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(setting, BAD, source, tmp_path)
    name = setting.variable if source == "environment variable" else repr(setting.name)
    for part in (repr(BAD), source, name, f"; allowed: {setting.allowed}"):
        assert part in str(caught.value)


@every_setting
def test_an_error_names_the_keyword_of_a_program(setting: Setting) -> None:
    with pytest.raises(ConfigError) as caught:
        open_cache({setting.name: BAD}, LAYOUT)
    assert f"{BAD!r} from key {setting.name!r} in open_cache" in str(caught.value)
    assert f"; allowed: {setting.allowed}" in str(caught.value)


@every_setting
def test_a_misspelt_name_brings_a_hint_at_the_right_one(setting: Setting) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {setting.name!r}"):
        load_config({setting.name[:-1] + "q": 1}, environ={})
    with pytest.raises(ConfigError, match=f"did you mean {setting.variable!r}"):
        load_config(environ={f"FLEXKV_{setting.name.upper()}Q": "1"})


@pytest.mark.parametrize("setting", [each for each in SETTINGS.values() if each.needs])
def test_a_setting_without_the_one_that_it_needs_is_an_error(setting: Setting) -> None:
    text = setting.written(accepted(setting)[0])
    with pytest.raises(ConfigError) as caught:
        load_config(environ={setting.variable: text})
    for part in (repr(text), f"environment variable {setting.variable}", f"{setting.needs} is not"):
        assert part in str(caught.value)
    empty = {setting.needs: SETTINGS[setting.needs].default}
    with pytest.raises(ConfigError, match=f"{setting.needs} is not set; allowed: both set"):
        load_config({setting.name: text} | empty, environ={})


def test_shares_are_a_mapping_a_text_or_pairs() -> None:
    shares = (("team-a", 40.0), ("c2FsdA==", 12.3456789))
    text = "team-a=40; c2FsdA===12.3456789"
    for form in ({"team-a": 40, "c2FsdA==": "12.3456789"}, text, list(shares), shares):
        assert load_config({"tenant_shares": form}).tenant_shares == shares
    assert SETTINGS["tenant_shares"].written(shares) == "team-a=40;c2FsdA===12.3456789"


@pytest.mark.parametrize(
    "wrong",
    [
        {"a": 60, "b": 41},
        {"a": 0},
        {"a": -1},
        {"": 1},
        {"a b": 1},
        {1: 1},
        {"x" * 129: 1},
        "a=1;a=2",
        "a=40,b=20",
        "a,b=20",
        "a=40&b=20",
        {"a=40,b": 20},
        {"a=1": 20},
        "a",
        [["a"]],
        [["a", 1, 2]],
        {f"t{number}": 1 for number in range(65)},
        {"a": "nan"},
        4,
    ],
)
def test_wrong_shares_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="is not a valid tenant_shares; allowed: NAME=PERCENT"):
        load_config({"tenant_shares": wrong})


@pytest.mark.parametrize("wrong", ["a,b", "a=40,b", "a=1", "a;b", "a b"])
def test_a_tenant_that_no_share_can_name_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid tenant; allowed: 1 to 128 printable"):
        load_config({"tenant": wrong})
    assert load_config({"tenant": "c2FsdA=="}).tenant == "c2FsdA=="
