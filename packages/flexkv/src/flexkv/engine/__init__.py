# SPDX-License-Identifier: Apache-2.0
"""What every engine's adapter is made of."""
