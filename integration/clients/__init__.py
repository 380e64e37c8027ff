# SPDX-License-Identifier: Apache-2.0
"""Clients of engines that others wrote, in an environment of their own."""
