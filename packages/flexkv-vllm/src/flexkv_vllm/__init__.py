# SPDX-License-Identifier: Apache-2.0
"""FlexKV for vLLM V1.

Three ways in, one adapter: `plugin` registers the connector when vLLM loads its plugins,
`connector` can be named as `kv_connector_module_path`, and `shim` is what the connector inside
vLLM itself calls.
"""

from __future__ import annotations

__version__ = "0.1.0"
