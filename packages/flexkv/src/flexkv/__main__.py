# SPDX-License-Identifier: Apache-2.0
"""`python -m flexkv` is the command `flexkv`."""

from __future__ import annotations

import sys

from flexkv.cli import main

sys.exit(main())
