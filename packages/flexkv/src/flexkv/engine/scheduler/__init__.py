# SPDX-License-Identifier: Apache-2.0
"""What follows the requests of an engine, in the process of its scheduler."""
