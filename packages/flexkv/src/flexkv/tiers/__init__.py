# SPDX-License-Identifier: Apache-2.0
"""Where blocks live below host memory. `base` is what every tier implements."""
