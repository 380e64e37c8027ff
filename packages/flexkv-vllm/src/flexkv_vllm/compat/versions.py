# SPDX-License-Identifier: Apache-2.0
"""The releases of vLLM that FlexKV starts with. Imports nothing of vLLM: it is an entry point."""

from __future__ import annotations

from flexkv.engine.releases import Releases

CONNECTOR_NAME = "FlexKVConnectorV1"

NEWEST = (0, 33)

CONNECTOR = Releases(CONNECTOR_NAME, (0, 20), NEWEST)
"""Releases (major, minor) that were tested with at least vLLM's scheduler: those of
compat-ci/versions.toml above the static level."""

OFFLOADING = Releases("OffloadingConnector", (0, 31), NEWEST)
"""Releases whose interface of offloading specs FlexKV implements. Older ones do not show the names
of a request's blocks; up to 0.29, they also offer blocks that were not computed."""

RELEASES = (CONNECTOR, OFFLOADING)
