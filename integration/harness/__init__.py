# SPDX-License-Identifier: Apache-2.0
"""What tests, benchmarks and the demo share: checkpoints, engines, connectors.

Nothing in this package imports torch or vLLM except ``driver`` and ``probe``, which run inside
the engine's own processes. So a test process stays small and holds no engine state.
"""
