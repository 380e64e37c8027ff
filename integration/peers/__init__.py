# SPDX-License-Identifier: Apache-2.0
"""Runs what `docs/pages/compare.md` says of other caches, as far as a machine without a GPU can."""
