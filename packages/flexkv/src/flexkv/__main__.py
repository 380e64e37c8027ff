# SPDX-License-Identifier: Apache-2.0
"""`python -m flexkv` is the command `flexkv`."""

from __future__ import annotations

from flexkv.cli import run

run()
