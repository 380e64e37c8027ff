# SPDX-License-Identifier: Apache-2.0
"""Tests, benchmarks and the demo: everything here starts real engines."""
