# SPDX-License-Identifier: Apache-2.0
"""What SGLang's own code behind `--enable-flexkv` imports by name."""
