# SPDX-License-Identifier: Apache-2.0
"""Blocks in object storage, for all engines that use the same bucket."""
