# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from flexkv.config import settings


def test_every_setting_is_documented() -> None:
    for setting in settings():
        assert {"env", "unit", "help", "parse", "allowed"} <= set(setting.metadata)
