# SPDX-License-Identifier: Apache-2.0
"""Host memory: the arena, its memory, and how processes meet to share it."""
