# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks between tiers, and how their completion is reported."""
