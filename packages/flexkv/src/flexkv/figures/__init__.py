# SPDX-License-Identifier: Apache-2.0
"""What FlexKV counts: the definitions of its metrics, the meter, and what engines serve."""
