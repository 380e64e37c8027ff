# SPDX-License-Identifier: Apache-2.0
"""Tests that start real engines. ``corpus`` holds the prompts, ``reference`` what is right."""
