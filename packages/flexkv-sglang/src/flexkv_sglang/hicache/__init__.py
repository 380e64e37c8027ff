# SPDX-License-Identifier: Apache-2.0
"""FlexKV's lower tiers under SGLang's own host tier, as a storage backend of HiCache."""
