# SPDX-License-Identifier: Apache-2.0
"""Which tests run for a change, and where their time goes."""
