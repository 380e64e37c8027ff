# SPDX-License-Identifier: Apache-2.0
"""Kernels that were built before `PackedKeys` moved look for it here."""

from flexkv.types.packed_keys import PackedKeys

__all__ = ["PackedKeys"]
