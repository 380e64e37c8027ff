# SPDX-License-Identifier: Apache-2.0
"""The errors that FlexKV raises at start.

Each names three things: the value, its source, and the allowed values. At run time FlexKV raises no
error into an engine: a block that cannot be stored or loaded is a miss.
"""

from __future__ import annotations


class FlexKVError(Exception):
    """Base of every error that FlexKV raises."""


class ConfigError(FlexKVError):
    """A setting is unknown, malformed or out of range."""


class LayoutError(FlexKVError):
    """The engine's KV cache has a layout that FlexKV cannot describe."""


class RankError(FlexKVError):
    """Another rank of the engine cannot start."""


class ArenaError(FlexKVError):
    """The shared host memory cannot be created, attached or owned."""


class DiskError(FlexKVError):
    """A directory for cached blocks cannot be created, locked, read or filled."""


class UnavailableError(DiskError):
    """A directory for cached blocks cannot be used now. It may become usable without a change of
    the settings: a mount comes late, a drive fails for a while, another engine ends."""


class StoreSettingError(FlexKVError):
    """A store that engines share cannot be used as the settings name it."""


class TraceError(FlexKVError):
    """A trace of requests, or a model's configuration beside it, cannot be read."""


class EngineVersionError(FlexKVError):
    """The engine is outside the range of versions that FlexKV supports."""
