# SPDX-License-Identifier: Apache-2.0
"""The settings of FlexKV, and the sources of their values."""
