# SPDX-License-Identifier: Apache-2.0
"""FlexKV for SGLang.

`plugin` turns `--enable-flexkv` into the flags that load `linker`. SGLang creates one linker in
each of its schedulers, and its radix tree looks prefixes up there. `start` assembles a rank:
`pages` describes SGLang's pools, `identity` describes its model, and `side` answers SGLang's calls
in step with the other `ranks`. `hooks` hides requests from the scheduler while a disk reads for
them.
"""

from __future__ import annotations

__version__ = "0.1.0"
