# SPDX-License-Identifier: Apache-2.0
"""Moving blocks between tiers: who copies, and how completion is told."""
