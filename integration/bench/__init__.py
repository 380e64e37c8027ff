# SPDX-License-Identifier: Apache-2.0
"""Measures FlexKV against its goals: ``python -m integration.bench --help``."""
