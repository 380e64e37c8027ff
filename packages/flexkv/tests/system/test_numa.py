# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from flexkv.system import numa


def test_this_machines_nodes_have_this_machines_processors() -> None:
    nodes = [int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*")]
    processors = [numa.processors_of(node) for node in nodes]
    assert os.sched_getaffinity(0) <= frozenset().union(*processors)
    assert sum(map(len, processors)) == len(frozenset().union(*processors))
    assert numa.processors_of(max(nodes) + 1) == frozenset()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}),
        ("5\n", {5}),
        ("\n", set()),
        ("no numbers", set()),
    ],
)
def test_lists_of_processors(
    text: str, expected: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node3").mkdir()
    (tmp_path / "node3" / "cpulist").write_text(text)
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    assert numa.processors_of(3) == expected


@pytest.mark.parametrize("bus_id", ["0001:3b:00.0", "00000001:3B:00.0", "1:3b:0.0", "0001:3B:00"])
def test_the_node_of_a_device_is_found_however_its_id_is_written(
    bus_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "0001:3b:00.0"
    device.mkdir()
    monkeypatch.setattr(numa, "_PCI", tmp_path)
    (device / "numa_node").write_text("1\n")
    assert numa.node_of_device(bus_id) == 1
    (device / "numa_node").write_text("-1\n")
    assert numa.node_of_device(bus_id) is None


@pytest.mark.parametrize("bus_id", ["", "GPU-5d3f", "0001:3c:00.0", "../../0", "3b:00.0"])
def test_an_unknown_device_has_no_node(
    bus_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "_PCI", tmp_path)
    assert numa.node_of_device(bus_id) is None


def test_mappings_are_told_by_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = tmp_path / "numa_maps"
    maps.write_text(
        "7fbce5bff000 default anon=1 dirty=1 N0=1 kernelpagesize_kB=4\n"
        "7fbce5c00000 default file=/memfd:flexkv-arena\\040(deleted) huge dirty=7 N0=3 N1=4 "
        "kernelpagesize_kB=2048\n"
        "7fbce6c00000 default\n"
    )
    monkeypatch.setattr(numa, "_NUMA_MAPS", maps)
    assert numa.bytes_by_node(0x7FBCE5C00000) == {0: 3 << 21, 1: 4 << 21}
    assert numa.bytes_by_node(0x7FBCE5BFF000) == {0: 4096}
    assert numa.bytes_by_node(0x7FBCE6C00000) == {}
    assert numa.bytes_by_node(0x7FBCE7C00000) == {}


@pytest.mark.parametrize("name", [b"\xf1", b"a\rb", b"a b"])
def test_names_of_mapped_files_change_nothing(tmp_path: Path, name: bytes) -> None:
    """Weights, for instance."""
    file = os.path.join(os.fsencode(tmp_path), name)
    with open(file, "wb+") as opened:
        opened.write(bytes(4096))
        opened.flush()
        with mmap.mmap(opened.fileno(), 4096):
            assert numa.bytes_by_node(1) == {}


def test_a_real_mapping_is_told_too() -> None:
    mapped = mmap.mmap(-1, 64 * mmap.PAGESIZE)
    mapped[:] = b"x" * len(mapped)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    assert sum(numa.bytes_by_node(address).values()) == len(mapped)
