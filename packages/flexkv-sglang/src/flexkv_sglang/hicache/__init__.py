# SPDX-License-Identifier: Apache-2.0
"""FlexKV's cache under SGLang's own host tier, as a storage backend of HiCache."""
