# SPDX-License-Identifier: Apache-2.0
"""Blocks in Mooncake Store: host memory of many nodes, over RDMA or TCP."""
