# SPDX-License-Identifier: Apache-2.0
"""Moving blocks between tiers: who copies, and how completion is told."""

from __future__ import annotations

from flexkv.transfer.board import CompletionBoard
from flexkv.transfer.job import Job, Outcome, Priority
from flexkv.transfer.link import Link
from flexkv.transfer.mover import Direction, Mover, Status

__all__ = ["CompletionBoard", "Direction", "Job", "Link", "Mover", "Outcome", "Priority", "Status"]
