# SPDX-License-Identifier: Apache-2.0
"""A real server under load while everything below its KV cache breaks: `nox -s campaign`.

The campaign's own process never imports torch or an engine. What breaks inside the engine's
processes is brought there by a plugin of it (`plugin`), and ordered over a file (`faults`). Engines
differ in `vllm` and `sglang` only.
"""
