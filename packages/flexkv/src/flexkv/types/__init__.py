# SPDX-License-Identifier: Apache-2.0
"""Plain types that all rooms share."""
