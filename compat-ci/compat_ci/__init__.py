# SPDX-License-Identifier: Apache-2.0
"""Which engine versions the adapters work with, found out by running; see versions.toml."""
