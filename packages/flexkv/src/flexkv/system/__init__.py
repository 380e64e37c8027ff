# SPDX-License-Identifier: Apache-2.0
"""What the operating system gives: files, folders, memory, processes, native modules."""
