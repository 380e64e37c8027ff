# SPDX-License-Identifier: Apache-2.0
"""What differs between releases of vLLM."""
