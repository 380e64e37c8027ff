# SPDX-License-Identifier: Apache-2.0
"""Host memory: the arena, what it is made of, and how processes meet to share it."""
