# SPDX-License-Identifier: Apache-2.0
"""One cache for all engines of a node: the service, and its client in an engine."""
