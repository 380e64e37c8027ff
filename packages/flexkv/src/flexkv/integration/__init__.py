# SPDX-License-Identifier: Apache-2.0
"""What engines import from `flexkv` by name. The code is in the adapter packages."""
