# SPDX-License-Identifier: Apache-2.0
"""What vLLM imports by name."""
