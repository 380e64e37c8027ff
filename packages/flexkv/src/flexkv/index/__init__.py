# SPDX-License-Identifier: Apache-2.0
"""Keys, slots, states, leases and pins of blocks."""
