# SPDX-License-Identifier: Apache-2.0
"""Tests and measurements on a CUDA device: ``python -m integration.gpu``.

Needs torch, pytest and the installed packages, two sections vLLM; no network. Every section runs in
a process of its own, so that a fault on the device, which ends all CUDA work of its process, ends
that section only. Each row is in a file as soon as it was measured: see `journal`.
"""
