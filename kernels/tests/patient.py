# SPDX-License-Identifier: Apache-2.0
"""Settings of hypothesis for code that has no time to keep."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""On a busy machine, how long an example or its making took says nothing."""
