# SPDX-License-Identifier: Apache-2.0
"""`python -m flexkv.cli` is `flexkv`."""

from __future__ import annotations

import sys

from flexkv.cli import main

sys.exit(main())
