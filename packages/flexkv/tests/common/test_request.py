# SPDX-License-Identifier: Apache-2.0
"""SGLang's own code behind `--enable-flexkv` ends with what is missing."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from flexkv import ConfigError

NAME = "flexkv.common.request"


@pytest.mark.parametrize(("plugins", "said"), [("a,b", "'a,b'"), (None, "None")])
def test_a_plugin_that_is_not_loaded_is_named(
    monkeypatch: pytest.MonkeyPatch, plugins: str | None, said: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    with pytest.raises(ConfigError, match=f"SGLANG_PLUGINS is {said}; allowed: unset, or a list"):
        importlib.import_module(NAME)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="flexkv-sglang is not installed"):
        importlib.import_module(NAME)
