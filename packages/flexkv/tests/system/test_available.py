# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv.system import available

V2 = "30 23 0:26 {root} {point} rw - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {root} {point} rw - cgroup cgroup rw,{controllers}"
LIMIT = 300 << 20


class Machine:
    """A tree of files as the kernel shows them, with 1 GB available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 2000000 kB\nMemAvailable: 1000000 kB\n")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(text))

    def mount(self, cgroup: str, *mounts: str) -> None:
        """What /proc/self has of control groups."""
        self.write("proc/self/cgroup", cgroup)
        self.write("proc/self/mountinfo", "\n".join(("22 1 8:1 / / rw - ext4 /dev/a rw", *mounts)))

    def limit2(self, folder: str, limit: str, used: int = 0, droppable: int = 0) -> None:
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {droppable}\nother 1")

    def limit1(self, folder: str, limit: str, used: int = 0, droppable: int = 0) -> None:
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"inactive_file 9\ntotal_inactive_file {droppable}")


MACHINE_BYTES = 1000000 * 1024
NO_LIMIT_1 = str(2**63 - 4096)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_available_memory_is_what_the_kernel_says() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < available.available_memory() <= total


def test_total_memory_is_the_lowest_limit_whatever_is_used(machine: Machine) -> None:
    assert available.total_memory(machine.root) == 2000000 * 1024
    machine.mount("0::/a/b\n", V2.format(root="/", point="/sys/fs/cgroup"))
    machine.limit2("sys/fs/cgroup/a", "700", used=650)
    machine.limit2("sys/fs/cgroup/a/b", "max", used=650)
    assert available.total_memory(machine.root) == 700
    machine.write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "3\n")
    assert available.total_memory(machine.root) == 3 * (2 << 20)


def test_what_others_are_about_to_take_counts_where_it_will_be_taken(machine: Machine) -> None:
    """A control group's limit counts those of its own processes only."""
    slice_, engine = "sys/fs/cgroup/user.slice", "sys/fs/cgroup/user.slice/engine.service"
    machine.mount("0::/user.slice/engine.service\n", V2.format(root="/", point="/sys/fs/cgroup"))
    machine.limit2(slice_, str(800 << 20))
    machine.limit2(engine, str(500 << 20))
    own = available.memory_groups(machine.root)
    assert own == {
        str((machine.root / each).stat().st_ino) for each in (slice_, engine, "sys/fs/cgroup")
    }
    shared = own - {str((machine.root / engine).stat().st_ino)}

    def left(size: int, groups: frozenset[str]) -> int:
        return available.available_memory(machine.root, [available.Promise(size, groups)] * 2)

    assert left(50 << 20, own) == 400 << 20
    assert left(50 << 20, shared) == 500 << 20
    assert left(200 << 20, shared) == 400 << 20
    assert left(200 << 20, frozenset()) == 500 << 20
    assert left(300 << 20, frozenset()) == MACHINE_BYTES - (600 << 20)
    assert left(MACHINE_BYTES, frozenset()) == 0


def test_without_control_groups_the_machine_counts(machine: Machine) -> None:
    assert available.available_memory(machine.root) == MACHINE_BYTES


@pytest.mark.parametrize("limited", ["", "/job", "/job/step", "/job/step/task"])
def test_a_limit_counts_at_every_level(machine: Machine, limited: str) -> None:
    machine.mount("0::/job/step/task\n", V2.format(root="/", point="/sys/fs/cgroup"))
    for folder in ("/job", "/job/step", "/job/step/task"):
        machine.limit2(f"sys/fs/cgroup{folder}", "max", used=10**9)
    machine.limit2(f"sys/fs/cgroup{limited}", "1000", used=700, droppable=200)
    assert available.available_memory(machine.root) == 500


@pytest.mark.parametrize("limited", ["", "/job", "/job/step"])
def test_a_limit_counts_at_every_level_of_version_1(machine: Machine, limited: str) -> None:
    point = "/sys/fs/cgroup/memory"
    machine.mount(
        "9:name=systemd:/elsewhere\n4:cpu,memory:/job/step\n0::/unified\n",
        V1.format(root="/", point="/sys/fs/cgroup/cpuset", controllers="cpuset"),
        V1.format(root="/", point=point, controllers="cpu,memory"),
        V2.format(root="/", point="/sys/fs/cgroup/unified"),
    )
    machine.limit1("sys/fs/cgroup/cpuset", "1")
    for folder in ("", "/job", "/job/step"):
        machine.limit1(point[1:] + folder, NO_LIMIT_1, used=10**9)
    machine.limit1(point[1:] + limited, "1000", used=900, droppable=50)
    assert available.available_memory(machine.root) == 150


def test_the_narrowest_level_counts(machine: Machine) -> None:
    machine.mount("0::/a/b\n", V2.format(root="/", point="/sys/fs/cgroup"))
    machine.limit2("sys/fs/cgroup/a", "5000", used=4900)
    machine.limit2("sys/fs/cgroup/a/b", "3000", used=1000)
    assert available.available_memory(machine.root) == 100
    machine.limit2("sys/fs/cgroup/a", "5000", used=5200)
    assert available.available_memory(machine.root) == 0


def test_what_the_kernel_throttles_at_is_a_limit(machine: Machine) -> None:
    machine.mount("0::/a\n", V2.format(root="/", point="/sys/fs/cgroup"))
    machine.limit2("sys/fs/cgroup/a", "5000", used=100)
    machine.write("sys/fs/cgroup/a/memory.high", "4000")
    assert available.available_memory(machine.root) == 3900


@pytest.mark.parametrize(
    ("cgroup", "mounted"),
    [
        ("0::/\n", "/"),  # a namespace of its own
        ("0::/kubepods/pod/this\n", "/kubepods/pod/this"),  # the host's path, its group mounted
        ("0::/kubepods/pod/this\n", "/kubepods/pod/other"),  # moved since it was mounted
        ("0::/../beside\n", "/"),  # outside of the namespace
    ],
)
def test_a_container_sees_its_limit_where_its_group_is_mounted(
    machine: Machine, cgroup: str, mounted: str
) -> None:
    machine.mount(cgroup, V2.format(root=mounted, point="/sys/fs/cgroup"))
    machine.limit2("sys/fs/cgroup", "1000", used=400)
    machine.limit2("sys/fs/beside", "10", used=10)
    assert available.available_memory(machine.root) == 600


@pytest.mark.parametrize("name", [b"Se\xf1or", "a\u2028b".encode(), b"a\rb", b"a\x0bb"])
def test_mounts_with_names_of_other_users_change_nothing(machine: Machine, name: bytes) -> None:
    """Any user with FUSE can make one."""
    odd = f"40 22 0:50 / /home/x/{os.fsdecode(name)} rw - fuse.x x rw"
    group = f"/pod {os.fsdecode(name)}"
    machine.mount(f"0::{group}\n", odd, V2.format(root="/", point="/sys/fs/cgroup"), odd)
    machine.limit2(f"sys/fs/cgroup{group}", "1000", used=400)
    assert available.available_memory(machine.root) == 600


def test_levels_below_what_is_mounted_count(machine: Machine) -> None:
    point = r"/sys/fs/with\040blank"
    machine.mount("0::/pod/container/scope\n", V2.format(root="/pod", point=point))
    machine.limit2("sys/fs/with blank/container", "1000", used=400)
    assert available.available_memory(machine.root) == 600
    found = available.levels("memory", machine.root)
    above = machine.root / "sys/fs/with blank"
    names = [level.folder.relative_to(above).as_posix() for level in found]
    assert names == ["container/scope", "container", "."]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 6),
        ({"/job/hugetlb.2MB.max": "max", "/job/hugetlb.2MB.current": "0"}, 6),
        ({"/job/hugetlb.2MB.max": "0", "/job/hugetlb.2MB.current": "0"}, 0),
        ({"/job/step/hugetlb.2MB.max": f"{2 << 21}", "/job/step/hugetlb.2MB.current": "0"}, 2),
        (
            {"/job/hugetlb.2MB.rsvd.max": f"{2 << 21}", "/job/hugetlb.2MB.rsvd.current": "2097152"},
            1,
        ),
    ],
)
def test_the_pool_counts_as_far_as_every_level_may_use_it(
    machine: Machine, files: dict[str, str], expected: int
) -> None:
    machine.mount("0::/job/step\n", V2.format(root="/", point="/sys/fs/cgroup"))
    assert available.free_huge_pages(machine.root) == 0  # no pool at all
    pool = "sys/kernel/mm/hugepages/hugepages-2048kB"
    machine.write(f"{pool}/free_hugepages", "10\n")
    machine.write(f"{pool}/resv_hugepages", "4\n")
    for name, text in files.items():
        machine.write(f"sys/fs/cgroup{name}", text)
    assert available.free_huge_pages(machine.root) == expected * (2 << 20)


def test_the_pool_of_version_1_counts_too(machine: Machine) -> None:
    point = "/sys/fs/cgroup/hugetlb"
    machine.mount("3:hugetlb:/job\n", V1.format(root="/", point=point, controllers="hugetlb"))
    pool = "sys/kernel/mm/hugepages/hugepages-2048kB"
    machine.write(f"{pool}/free_hugepages", "10\n")
    machine.write(f"{pool}/resv_hugepages", "0\n")
    machine.write(f"{point[1:]}/job/hugetlb.2MB.limit_in_bytes", f"{3 << 21}")
    machine.write(f"{point[1:]}/job/hugetlb.2MB.usage_in_bytes", "0")
    assert available.free_huge_pages(machine.root) == 3 << 21


@pytest.fixture
def nested_groups() -> Iterator[Path]:
    """A control group below one with a limit of its own; made where this user may."""
    own = available.levels("memory")
    if not own:
        pytest.skip("there are no control groups for memory here")
    outer = own[0].folder / f"flexkv-{uuid.uuid4()}"
    inner = outer / "inner"
    try:
        try:
            inner.mkdir(parents=True)
            if own[0].version == 2:
                (outer / "cgroup.subtree_control").write_text("+memory")
            name = "memory.max" if own[0].version == 2 else "memory.limit_in_bytes"
            (outer / name).write_text(str(LIMIT))
        except OSError as error:
            pytest.skip(f"control groups cannot be made here: {error}")
        yield inner
    finally:
        for folder in (inner, outer):
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()


INSIDE = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from flexkv import ArenaError
from flexkv.host.arena import plan_arena
from flexkv.layout import BlockFormat
from flexkv.system.available import available_memory
print(available_memory())
try:
    plan_arena(BlockFormat(1, (1 << 20,)), 1.0)
except ArenaError as error:
    print(error)
"""


def test_a_process_two_levels_below_a_limit_sees_it(nested_groups: Path) -> None:
    command = [sys.executable, "-c", INSIDE, str(nested_groups)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    available, refused = done.stdout.splitlines()
    assert LIMIT // 2 < int(available) <= LIMIT
    assert refused.startswith("cpu_cache_gb is 1 GiB; allowed: at most 0.2")
