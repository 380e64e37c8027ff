# SPDX-License-Identifier: Apache-2.0
"""FlexKV for SGLang.

`plugin` has `--enable-flexkv` run `linker`, which SGLang makes in each of its schedulers. `start`
builds what it consists of: `pages` describes SGLang's pools, `identity` its model, and `side` does
what SGLang asks, in step with the other `ranks`. `hooks` keeps requests out of the scheduler's
sight while a disk reads for them.
"""

from __future__ import annotations

__version__ = "0.1.0"
