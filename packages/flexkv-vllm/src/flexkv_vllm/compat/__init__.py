# SPDX-License-Identifier: Apache-2.0
"""The differences between releases of vLLM."""
