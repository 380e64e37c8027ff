# SPDX-License-Identifier: Apache-2.0
"""What a workload's trace says about memory, disk and policies: `flexkv plan`."""
