# SPDX-License-Identifier: Apache-2.0
"""Named faults that the tests must notice: the lists (`*.toml`) and what runs them."""
