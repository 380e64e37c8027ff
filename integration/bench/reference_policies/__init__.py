# SPDX-License-Identifier: Apache-2.0
"""Policies of the literature, to which the benchmark compares FlexKV's own."""
