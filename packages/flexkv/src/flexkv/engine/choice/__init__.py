# SPDX-License-Identifier: Apache-2.0
"""Whether a load is worth its time."""
