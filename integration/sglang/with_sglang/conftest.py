# SPDX-License-Identifier: Apache-2.0
"""These tests run in SGLang's Python, started by `integration/tests/test_sglang_units.py`."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]
