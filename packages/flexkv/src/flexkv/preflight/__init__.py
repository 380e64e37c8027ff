# SPDX-License-Identifier: Apache-2.0
"""Checks before a start. `flexkv doctor` runs all of them, every start those that can refuse it."""
