# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from flexkv import host_memory


def test_available_memory_is_what_the_kernel_says() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < host_memory.available_memory() <= total


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "1000", "memory.current": "700", "memory.stat": "inactive_file 200"}, 500),
        ({"memory.max": "max", "memory.current": "700", "memory.stat": ""}, None),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "900",
                "memory/memory.stat": "total_inactive_file 50\nother 1",
            },
            150,
        ),
        ({"memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
        ({}, None),
    ],
)
def test_a_containers_limit_counts(
    files: dict[str, str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    available = host_memory.available_memory()
    if expected is None:
        assert available > 1000
    else:
        assert available == expected
