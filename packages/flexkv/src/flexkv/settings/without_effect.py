# SPDX-License-Identifier: Apache-2.0
"""Names settings that are set and have no effect. A start logs them once."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping

from flexkv.settings.config import SETTINGS, CacheConfig
from flexkv.settings.setting import ReadBy, shorten
from flexkv.settings.settings_file import CONFIG_PATH_VARIABLE

logger = logging.getLogger(__name__)

_LMCACHE = "LMCACHE_"
"""The prefix of LMCache's variables."""


def without_effect(config: CacheConfig, ignored: Mapping[str, str] | None = None) -> list[str]:
    """Find the settings that differ from their defaults and have no effect: a sentence for each
    reason, without its full stop. `ignored` has those that this program has no use for, each with
    the reason."""
    given = {each.name for each in SETTINGS.values() if getattr(config, each.name) != each.default}
    names: dict[str, list[str]] = {}
    for name in SETTINGS:
        reason = _reason(config, name, ignored or {}) if name in given else ""
        if reason:
            names.setdefault(reason, []).append(name)
    return [
        f"{', '.join(each)}: set, but without effect, because {why}" for why, each in names.items()
    ]


def report_without_effect(config: CacheConfig, ignored: Mapping[str, str] | None = None) -> None:
    """Log a warning for each sentence of `without_effect`. A start calls this in one process."""
    for sentence in without_effect(config, ignored):
        logger.warning("%s", sentence)


def engines_settings(reason: str, but: Collection[str] = ()) -> dict[str, str]:
    """The settings of engines, for a program that runs none, with the reason; those in `but` are
    left out."""
    return {
        each.name: reason
        for each in SETTINGS.values()
        if each.read_by is ReadBy.ENGINE and each.name not in but
    }


def own_variables(environ: Mapping[str, str] | None = None) -> str:
    """The variables of FlexKV's settings that are set in an environment, by default this process's,
    as text; empty for none. Those that turn FlexKV on or off are left out."""
    known = (each.variable for each in SETTINGS.values() if each.variable.startswith("FLEXKV_"))
    return _given((*known, CONFIG_PATH_VARIABLE), os.environ if environ is None else environ)


def lmcaches_variables() -> str:
    """A sentence about LMCache's variables that are set beside FlexKV; empty for none."""
    theirs = _given((name for name in os.environ if name.startswith(_LMCACHE)), os.environ)
    if not theirs:
        return ""
    return f"{theirs}: set, but without effect on FlexKV; see the page 'Coming from other caches'"


def _given(names: Iterable[str], environ: Mapping[str, str]) -> str:
    return shorten(", ".join(sorted(name for name in names if environ.get(name))))


def _reason(config: CacheConfig, name: str, ignored: Mapping[str, str]) -> str:
    """Why a setting has no effect; empty if it has one."""
    setting = SETTINGS[name]
    if name in ignored:
        return ignored[name]
    if config.service is not None and setting.read_by is ReadBy.CACHE:
        return f"the service in {config.service!r} has settings of its own: set it there"
    if setting.acts_with and not getattr(config, setting.acts_with):
        zero = " or is 0" if setting.acts_with == "ssd_cache_gb" else ""
        return f"{setting.acts_with} is not set{zero}"
    return ""
