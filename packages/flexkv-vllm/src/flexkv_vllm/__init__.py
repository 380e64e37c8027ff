# SPDX-License-Identifier: Apache-2.0
"""FlexKV for vLLM V1.

There are three entry points. `plugin` registers the connector when vLLM loads its plugins,
`connector` can be named as `kv_connector_module_path`, and vLLM's own connector calls
`intree_connector`. The connector calls two parts of `flexkv.engine`: a `RequestSide` beside vLLM's
scheduler, which `start_scheduler` builds, and a `WorkerSide` beside each of its workers, which
`start_worker` builds and `worker_calls` calls. They communicate by `orders`. `keys` names a
prompt's blocks, and `identity` what their bytes depend on otherwise. `offloading` serves vLLM's own
OffloadingConnector instead. `compat` has the differences between versions of vLLM.
"""

from __future__ import annotations

__version__ = "0.1.0"
