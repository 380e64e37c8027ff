# SPDX-License-Identifier: Apache-2.0
"""Tests of code that has no time to keep say nothing about the time that it took."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A machine that others use stands still at times. All else as the profile that is in force.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")
