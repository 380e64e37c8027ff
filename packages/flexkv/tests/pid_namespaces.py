# SPDX-License-Identifier: Apache-2.0
"""Commands that run as in another container."""

from __future__ import annotations

import subprocess

import pytest

ELSEWHERE = "of another PID namespace, such as a container's"


def in_a_namespace(*command: str) -> list[str]:
    """The command that runs `command` as process 1 of a PID namespace of its own."""
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make PID namespaces")
    return [*namespace, *command]
