# SPDX-License-Identifier: Apache-2.0
"""FlexKV for vLLM V1.

Three ways in, one adapter: `plugin` registers the connector when vLLM loads its plugins,
`connector` can be named as `kv_connector_module_path`, and `shim` is what the connector inside
vLLM itself calls. `adapter` is made by all of them; `start` builds what it consists of: `scheduler`
beside vLLM's scheduler, `worker` beside each of its workers, and `telemetry`. They talk through
`orders`. `offloading` serves vLLM's own OffloadingConnector instead. What differs between versions
of vLLM is in `compat` and `compat_events`.
"""

from __future__ import annotations

__version__ = "0.1.0"
