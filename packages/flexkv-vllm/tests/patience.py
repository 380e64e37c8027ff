# SPDX-License-Identifier: Apache-2.0
"""As `packages/patience.py`, by the name that tests of vLLM's adapter share."""

from __future__ import annotations

from packages.patience import PATIENCE_SECONDS, wait_until

__all__ = ["PATIENCE_SECONDS", "wait_until"]
