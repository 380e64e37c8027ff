# SPDX-License-Identifier: Apache-2.0
"""Records the step that last used each of the engine's blocks. Loads into them must follow it.

The code is among the kernels, because an engine's step waits for it; `flexkv_kernels/steps.pyi`
describes its calls. The kernels look for the name here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexkv.system.native import kernels

if TYPE_CHECKING:
    from flexkv_kernels.steps import AccessLog
else:
    AccessLog = object

__all__ = ["AccessLog", "access_log"]


def access_log() -> AccessLog:
    """An `AccessLog` that knows no request. Raises ConfigError if the kernels are not installed."""
    uses: AccessLog = kernels("steps").NativeAccessLog()
    return uses
