# SPDX-License-Identifier: Apache-2.0
"""`flexkv doctor` has every error of a start that it can know of. The table names each place in the
code that makes one: with settings that bring it about, or with the reason why doctor cannot know.

Errors about an engine's pages and model (`LayoutError`) are left out: only an engine knows them.
"""

from __future__ import annotations

import ast
import enum
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import pytest

from flexkv import FlexKVError, KVLayout, TensorView, open_cache
from flexkv.cli import main
from flexkv.operators.engine_door import local_http
from flexkv.preflight.checks import check_start
from flexkv.service.attach import join_pool
from flexkv.session.runtime_directory import RuntimeDirectory
from flexkv.session.wire import ServiceTicket
from flexkv.settings import GIB, load_config
from flexkv.system.available import total_memory

SOURCES = sorted(Path(__file__).parents[3].glob("*/src"))
ERRORS = {
    *("FlexKVError", "ConfigError", "ArenaError", "DiskError", "UnavailableError", "HungError"),
    *("StoreSettingError", "EngineVersionError", "disk_error"),
}
NO_START = (
    *("flexkv.cli.", "flexkv.plan.", "flexkv.preflight.", "flexkv.common."),
    "flexkv.operators.ask_door",
)
NOBODY = 65534
LAYOUT = KVLayout.from_tensors([TensorView.of("a", np.zeros((2, 4096), np.int8))], 2)


class Unknown(enum.Enum):
    """Why doctor cannot know an error."""

    COMMAND_LINE = "it depends on the command line of the engine or the service"
    PROGRAM = "it depends on the arguments of a program's call"
    PEERS = "it depends on what other processes do at that time"
    SYSTEM = "the system refuses a call that doctor does not make, since it changes nothing"
    GOES_ON = "the start goes on: it is logged"
    NEVER = "no settings bring it about"
    VERSIONS = "test_doctor_engines.py has the versions of engines"


class World:
    """Where a start and doctor run with the same settings."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.patch = patch

    def set(self, **settings: object) -> None:
        for name, value in settings.items():
            self.patch.setenv(name, str(value))

    def disk(self, gb: object = 0.01) -> Path:
        path = self.root / "kv"
        self.set(FLEXKV_SSD_CACHE_DIR=path, FLEXKV_SSD_CACHE_GB=gb)
        return path

    def folder(self) -> Path:
        """The folder of the blocks of `LAYOUT`, which a start before has made."""
        path = self.disk()
        start()
        (made,) = path.iterdir()
        return made

    def file(self, text: str) -> None:
        path = self.root / "flexkv.yaml"
        path.write_text(text)
        self.set(FLEXKV_CONFIG_PATH=path)

    def lose(self, package: str, *importers: str) -> None:
        """Let a package be one that is not installed."""
        for name in [*sys.modules]:
            if name == package or name.startswith((f"{package}.", *importers)):
                self.patch.delitem(sys.modules, name)
        self.patch.setitem(sys.modules, package, cast(Any, None))


def start() -> None:
    open_cache(None, LAYOUT, identity="model").close()


def meet_others() -> None:
    RuntimeDirectory(load_config().session_root, create=True).close()


def answer_operators() -> None:
    local_http(load_config())


def whole_memory(world: World) -> None:
    """The system itself has some of it."""
    world.set(FLEXKV_CPU_CACHE_GB=total_memory() / GIB)


def open_token(world: World) -> None:
    world.set(FLEXKV_CONTROL_PORT=9400)
    token = world.root / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o644)
    world.set(FLEXKV_CONTROL_TOKEN_FILE=token)


def join_service() -> None:
    root = load_config().service
    assert root is not None
    join_pool(ServiceTicket(root, 1, "00" * 16, "engine", "toy"), cast(Any, None))


@dataclass(frozen=True, slots=True)
class Case:
    """Settings that bring an error about.

    Attributes:
        check: the check of doctor that has it.
        make: makes them.
        start: the start.
        early: whether an engine's first process raises it, before it reads weights.
    """

    check: str
    make: Callable[[World], object]
    start: Callable[[], None] = start
    early: bool = True


def bad(name: str, value: object) -> Case:
    return Case("settings", lambda world: world.set(**{name: value}))


def file(text: str) -> Case:
    return Case("settings", lambda world: world.file(text))


def no_kernels(world: World) -> None:
    world.lose("flexkv_kernels")


def no_obstore(world: World) -> None:
    world.lose("obstore", "flexkv.tiers.objects")
    world.set(FLEXKV_OBJECTS_URL="s3://bucket")


def no_mooncake(world: World) -> None:
    world.lose("mooncake", "flexkv.tiers.mooncake")
    world.set(
        FLEXKV_MOONCAKE_MASTER="127.0.0.1:9",
        FLEXKV_MOONCAKE_METADATA="http://127.0.0.1:9/metadata",
    )


def open_runtime_dir(world: World) -> None:
    path = world.root / "open"
    path.mkdir()
    path.chmod(0o777)
    world.set(FLEXKV_RUNTIME_DIR=path)


def one_directory_twice(world: World) -> None:
    path = world.disk()
    path.mkdir()
    (world.root / "link").symlink_to(path)
    world.set(FLEXKV_SSD_CACHE_DIR=f"{path};{world.root}/link")


def foreign_folder(world: World) -> None:
    os.chown(world.folder(), NOBODY, NOBODY)


def open_cache_directory(world: World) -> None:
    path = world.disk()
    path.mkdir()
    path.chmod(0o777)
    os.chown(path, NOBODY, NOBODY)


def newer_table(world: World) -> None:
    (world.folder() / "table").write_bytes(b"FLEXKVTB" + bytes([99]))


def table_of_others(world: World) -> None:
    (world.folder() / "table").write_bytes(b"my thesis")


def table_that_is_a_directory(world: World) -> None:
    table = world.folder() / "table"
    table.unlink()
    table.mkdir()


def plain_http(world: World) -> None:
    world.set(FLEXKV_OBJECTS_URL="s3://bucket", AWS_ENDPOINT_URL="http://127.0.0.1:9")


def in_place_of_a_disk(world: World) -> None:
    world.disk().touch()


SETTINGS_FILE = [
    bad("FLEXKV_CONFIG_PATH", "/none.yaml"),
    file("a: b: c"),
    file("[1, 2]"),
]
TABLES = [Case("disk", each) for each in (table_that_is_a_directory, newer_table, table_of_others)]

TABLE: dict[str, Sequence[Case | Unknown]] = {
    "flexkv.eviction.policy:hazard_policy": [Unknown.NEVER],
    "flexkv.host.arena:plan_arena": [
        Case("memory", whole_memory, early=False),
        Case("memory", lambda world: world.set(FLEXKV_CPU_CACHE_GB=1e-6), early=False),
    ],
    "flexkv.host.arena:Arena.__init__": [Unknown.PEERS] * 2,
    "flexkv.host.arena:Arena._in_ordinary_memory": [Unknown.PEERS],
    "flexkv.host.arena:Arena._map_new": [Unknown.SYSTEM],
    "flexkv.host.arena:Arena.populate": [Unknown.SYSTEM],
    "flexkv.host.memory_file:check_seals": [Unknown.PEERS] * 2,
    "flexkv.host.memory_lock:MemoryLock.__init__": [Unknown.SYSTEM],
    "flexkv.library.open_cache:open_cache": [Unknown.PROGRAM],
    "flexkv.library.open_cache:_read_config": [Unknown.PROGRAM],
    "flexkv.library.page_copies:Copier.check": [Unknown.PROGRAM],
    "flexkv.tiers.shared_store:SharedStore.lacks_client": [Case("objects", no_obstore)],
    "flexkv.service.attach:Attached.resume": [Unknown.PEERS],
    "flexkv.service.attach:_closed_on_error": [Unknown.PEERS],
    "flexkv.service.attach:_greet": [
        Case("service", lambda w: w.set(FLEXKV_SERVICE=w.root / "node"), join_service, early=False),
        *[Unknown.PEERS] * 4,
    ],
    "flexkv.service.pool:PoolMemory.__init__": [Unknown.PEERS],
    "flexkv.service.pool:PoolMemory.resume": [Unknown.PEERS],
    "flexkv.service.pool_sizes:_Reader.check_keys": [Unknown.COMMAND_LINE],
    "flexkv.service.pool_sizes:_Reader.check_total": [Unknown.COMMAND_LINE] * 2,
    "flexkv.service.pool_sizes:_Reader.sizes": [Unknown.COMMAND_LINE],
    "flexkv.service.pool_sizes:_Reader.wrong": [Unknown.COMMAND_LINE],
    "flexkv.service.private_service:_start": [Unknown.SYSTEM],
    "flexkv.service.private_service:start_private": [Unknown.PEERS],
    "flexkv.operators.engine_door:_refused": [Case("control", open_token, answer_operators)],
    "flexkv.session.meet:_connect": [Unknown.PEERS],
    "flexkv.session.meet:_enter": [Unknown.PEERS] * 3,
    "flexkv.session.runtime_directory:RuntimeDirectory._lock": [Unknown.PEERS],
    "flexkv.session.runtime_directory:RuntimeDirectory.listen": [Unknown.PEERS],
    "flexkv.session.runtime_directory:_refused": [
        Case("runtime_dir", open_runtime_dir, meet_others)
    ],
    "flexkv.session.session_server:Server.gather": [Unknown.PEERS] * 2,
    "flexkv.session.state_reports:read_states": [Unknown.PEERS],
    "flexkv.settings.config:CacheConfig.__post_init__": [
        Case(
            "settings",
            lambda world: world.set(
                FLEXKV_MAX_AGE_SECONDS=3600, FLEXKV_OBJECTS_URL="s3://bucket/cache"
            ),
        )
    ],
    "flexkv.settings.config_sources:_from_environment": [bad("FLEXKV_CPU_CASHE_GB", 1)],
    "flexkv.settings.config_sources:_from_mapping": [file("cpu_cashe_gb: 1")],
    "flexkv.settings.setting:Setting.read": [bad("FLEXKV_CPU_CACHE_GB", "much")],
    "flexkv.settings.setting:Setting.lacks_needed": [bad("FLEXKV_SSD_CACHE_DIR", "/tmp")],
    "flexkv.settings.settings_file:read_file": SETTINGS_FILE,
    "flexkv.settings.tencents_names:_refused": [bad("FLEXKV_ENABLE_GDS", 1)],
    "flexkv.system.native:kernels": [Case("packages", no_kernels, early=False)],
    "flexkv.tiers.disk.folder:folders": [Unknown.SYSTEM],
    "flexkv.tiers.disk.folder:claim": [Unknown.GOES_ON],
    "flexkv.tiers.disk.folder:_unusable": [Case("disk", in_place_of_a_disk)],
    "flexkv.tiers.disk.folder:check_owner": [Case("disk", foreign_folder, early=False)],
    "flexkv.tiers.disk.folder:_refuse_others": [Case("disk", open_cache_directory)],
    "flexkv.tiers.disk.disk_store:check_table": [
        Case(each.check, each.make, early=False) for each in TABLES
    ],
    "flexkv.tiers.disk.disk_store:DiskStore.__init__": [
        Case("disk", lambda world: world.disk(1e-5), early=False),
        Unknown.SYSTEM,
    ],
    "flexkv.tiers.disk.folder:close_to_others": [Unknown.SYSTEM],
    "flexkv.tiers.disk.files:disk_error": [Unknown.SYSTEM] * 2,
    "flexkv.tiers.disk.inspect:unreadable": [Unknown.SYSTEM],
    "flexkv.tiers.disk.opening:Opening._open_drive": [Unknown.PEERS, Unknown.SYSTEM],
    "flexkv.tiers.disk.opening:check_apart": [Case("disks", one_directory_twice)],
    "flexkv.tiers.disk.removal:check_room": [
        Case("disk", lambda world: world.disk(1 << 20), early=False)
    ],
    "flexkv.tiers.objects.open_objects:connect": [
        Case("objects", plain_http),
        Case("objects", lambda world: world.set(FLEXKV_OBJECTS_URL="az://container")),
    ],
    "flexkv.tiers.objects.shared_folder:open_shared_folder": [
        Case("objects", lambda world: world.set(FLEXKV_OBJECTS_URL="file:///none/kv")),
        Unknown.PEERS,
    ],
    "flexkv.types.deadline:call_beside": [Unknown.GOES_ON],
    "flexkv_sglang.compat:check_version": [Unknown.VERSIONS],
    "flexkv_sglang.hicache.storage:_check_engine": [Unknown.VERSIONS],
    "flexkv_sglang.hicache.place:Place.of": [Unknown.COMMAND_LINE],
    "flexkv_sglang.hicache.stores:PoolStores.__init__": [Unknown.COMMAND_LINE],
    "flexkv_sglang.linker:FlexKVLinker.__init__": [Unknown.COMMAND_LINE],
    "flexkv_sglang.settings:read_settings": [Unknown.COMMAND_LINE],
    "flexkv_sglang.settings:read_storage_settings": [Unknown.COMMAND_LINE],
    "flexkv_sglang.support:_refuse": [Unknown.COMMAND_LINE],
    "flexkv_sglang.support:load_page_hash": [Unknown.SYSTEM],
    "flexkv_vllm.compat.core:check_version": [Unknown.VERSIONS],
    "flexkv_vllm.settings:load_mode_of": [Unknown.COMMAND_LINE] * 4,
    "flexkv_vllm.offloading.__init__:": [Unknown.VERSIONS],
    "flexkv_vllm.offloading.spec:_check_alone": [Unknown.COMMAND_LINE],
    "flexkv_vllm.offloading.spec:_check_blocks": [Unknown.COMMAND_LINE] * 2,
    "flexkv_vllm.offloading.start_tier:open_below": [Unknown.COMMAND_LINE] * 2,
    "flexkv_vllm.settings:_role_of": [Unknown.COMMAND_LINE],
}
CASES = [
    pytest.param(site, each, id=f"{site.rpartition('.')[2]}-{number}")
    for site, entries in TABLE.items()
    for number, each in enumerate(entries)
    if isinstance(each, Case)
]
FOR_ROOT = (foreign_folder, open_cache_directory)


def made_errors(tree: ast.AST, scope: str = "") -> Iterator[str]:
    """The functions in which a syntax tree makes errors of a start, one for each error."""
    for node in ast.iter_child_nodes(tree):
        inner = scope
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = f"{scope}.{node.name}" if scope else node.name
        if isinstance(node, ast.Call):
            func = node.func
            ways = [func.body, func.orelse] if isinstance(func, ast.IfExp) else [func]
            if any(isinstance(way, ast.Name) and way.id in ERRORS for way in ways):
                yield scope
        yield from made_errors(node, inner)


def sites() -> Iterator[str]:
    for source in SOURCES:
        for path in sorted(source.rglob("*.py")):
            module = ".".join(path.relative_to(source).with_suffix("").parts)
            if not f"{module}.".startswith(NO_START):
                for function in made_errors(ast.parse(path.read_text())):
                    yield f"{module}:{function}"


def test_the_table_has_every_error_of_a_start() -> None:
    """A new one needs a check of doctor, and a case here."""
    wanted = {site: len(entries) for site, entries in TABLE.items()}
    assert dict(Counter(sites())) == wanted


def test_a_new_error_is_seen() -> None:
    code = "class A:\n def f(self):\n  raise (DiskError if self else ArenaError)('x') from None\n"
    assert list(made_errors(ast.parse(code))) == ["A.f"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    for name in [*os.environ]:
        if "FLEXKV" in name or name.startswith(("AWS_", "AZURE_")):
            monkeypatch.delenv(name)
    made = World(tmp_path, monkeypatch)
    made.set(FLEXKV_RUNTIME_DIR=tmp_path / "run", FLEXKV_CPU_CACHE_GB=0.004)
    return made


@pytest.fixture
def makers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions in which errors have been made since, and those that called them."""
    found: list[str] = []

    def note(error: FlexKVError, *args: object) -> None:
        frame: FrameType | None = sys._getframe(1)
        for _ in range(2):  # the error may be made in `disk_error`
            if frame is not None:
                found.append(f"{frame.f_globals['__name__']}:{frame.f_code.co_qualname}")
                frame = frame.f_back
        Exception.__init__(error, *args)

    monkeypatch.setattr(FlexKVError, "__init__", note, raising=False)
    return found


@pytest.mark.parametrize(("site", "case"), CASES)
def test_doctor_has_the_error(
    site: str, case: Case, world: World, makers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if case.make in FOR_ROOT and os.geteuid() != 0:
        pytest.skip("only root can make files of another user")
    case.make(world)
    makers.clear()
    with pytest.raises(FlexKVError) as caught:
        case.start()
    assert site in makers
    capsys.readouterr()
    assert main(["doctor", "--seconds", "0", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    found = [each for each in findings if each["check"].split()[0] == case.check]
    problems = [each for each in found if each["level"] == "problem"]
    assert problems, findings
    assert all(each["change"] for each in problems)
    said = str(caught.value).partition("; allowed: ")[0]
    if case.early:
        assert said in [each["text"] for each in problems]


@pytest.mark.parametrize(
    ("site", "case"), [each for each in CASES if cast(Case, each.values[1]).early]
)
def test_a_first_process_raises_the_error_before_weights_are_read(
    site: str, case: Case, world: World
) -> None:
    if case.make in FOR_ROOT and os.geteuid() != 0:
        pytest.skip("only root can make files of another user")
    case.make(world)
    with pytest.raises(FlexKVError) as late:
        case.start()
    with pytest.raises(FlexKVError) as early:
        check_start(load_config())
    assert str(early.value) == str(late.value)


def test_a_program_does_without_a_runtime_directory(world: World) -> None:
    open_runtime_dir(world)
    start()


def test_a_missing_client_of_mooncake_is_found_without_its_import(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    no_mooncake(world)
    with pytest.raises(FlexKVError, match=r"mooncake_master .*pip install 'flexkv\[mooncake\]'"):
        check_start(load_config())
    assert main(["doctor", "--seconds", "0"]) == 1
    assert "problem  mooncake: mooncake_master is '127.0.0.1:9', but" in capsys.readouterr().out


@pytest.fixture(autouse=True)
def _modules() -> Iterator[None]:
    """Modules that a test has imported again are as they were: classes are compared by identity."""
    before = dict(sys.modules)
    yield
    for name in [*sys.modules]:
        if name not in before and name.startswith(("flexkv.tiers", "flexkv_kernels")):
            del sys.modules[name]
    sys.modules.update(before)
    importlib.invalidate_caches()
