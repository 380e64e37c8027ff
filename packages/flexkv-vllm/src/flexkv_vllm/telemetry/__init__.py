# SPDX-License-Identifier: Apache-2.0
"""What is told of the cache: KV events, counters, and vLLM's statistics and metrics."""
