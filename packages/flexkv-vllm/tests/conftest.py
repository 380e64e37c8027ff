# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

# All of the adapter is written against vLLM's own classes: without them there is nothing to test.
pytest.importorskip("vllm", reason="vLLM is not installed")
