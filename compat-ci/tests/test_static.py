# SPDX-License-Identifier: Apache-2.0
"""The static level must fail where an engine changes, with the name of what changed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import pytest

from compat_ci import matrix
from compat_ci.matrix import Engine
from compat_ci.static import check
from compat_ci.wheels import Tree

V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
BASE = f"{V1}/base.py"
IN_TREE = f"{V1}/flexkv_connector.py"
FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
POOL = "vllm/v1/core/block_pool.py"
OUTPUT = "vllm/v1/core/sched/output.py"
OFFLOAD = "vllm/v1/kv_offload/base.py"
OFFLOAD_CONFIG = "vllm/v1/kv_offload/config.py"
TRANSFER = "vllm/config/kv_transfer.py"
PARALLEL = "vllm/distributed/parallel_state.py"
UTILS = "vllm/distributed/utils.py"
SHIM_CALL = "self._flexkv_connector"


@dataclass(frozen=True, slots=True)
class Edit:
    """In `file` of vLLM, `old` becomes `new` wherever it is."""

    file: str
    old: str
    new: str


def one_more(file: str, before: str, name: str) -> Edit:
    """An abstract method stands before another one."""
    head = f"    @abstractmethod\n    def {before}("
    return Edit(file, head, f"    @abstractmethod\n    def {name}(self): ...\n\n{head}")


BREAKS: dict[str, tuple[list[Edit], list[str]]] = {
    "an abstract method renamed": (
        [Edit(BASE, "def wait_for_save(", "def finalize_saves(")],
        ["abstract: `finalize_saves`", "has no class attribute `wait_for_save`"],
    ),
    "an abstract method more": (
        [one_more(BASE, "wait_for_save", "drain")],
        ["abstract: `drain`"],
    ),
    "a method that we override gone": (
        [Edit(BASE, "def reset_cache(", "def clear_cache(")],
        ["has no class attribute `reset_cache`"],
    ),
    "a property that we override gone": (
        [Edit(BASE, "def requires_kv_delivery(", "def needs_delivery(")],
        ["has no class attribute `requires_kv_delivery`"],
    ),
    "an argument more for a method that we override": (
        [Edit(BASE, "def handle_preemptions(self, ", "def handle_preemptions(self, step: int, ")],
        ["`WorkerCalls.handle_preemptions`"],
    ),
    "an argument more for the constructor": (
        [
            Edit(
                BASE,
                "        role: KVConnectorRole,\n",
                "        role: KVConnectorRole, rank: int,\n",
            )
        ],
        ["KVConnectorBase_V1.__init__`", "takes_the_same"],
    ),
    "an argument less of a function that we call": (
        [Edit(FACTORY, "module_path: str, class_name: str", "module_path: str")],
        ["KVConnectorFactory.register_connector"],
    ),
    "an argument less of a method that we call": (
        [Edit(POOL, "block_hash: BlockHash, kv_cache_group_ids: list[int]", "block_hash: bytes")],
        ["BlockPool.get_cached_block"],
    ),
    "a private name that we use gone": (
        [Edit(FACTORY, "_registry", "_connectors")],
        ["no class attribute `_registry`"],
    ),
    "an attribute that we read renamed": (
        [Edit(OUTPUT, "preempted_req_ids", "preempted")],
        ["`SchedulerOutput` has no attribute `preempted_req_ids`"],
    ),
    "an attribute of an attribute renamed": (
        [Edit(TRANSFER, "kv_load_failure_policy", "load_failure_policy")],
        ["`KVTransferConfig` has no attribute `kv_load_failure_policy`"],
    ),
    "a private attribute that we read renamed": (
        [Edit(BASE, "self._kv_cache_config", "self._cache_config")],
        ["worker_calls.py", "`_kv_cache_config`"],
    ),
    "an import moved": (
        [
            Edit(PARALLEL, "def get_tp_group(", "def tp_group("),
            Edit(UTILS, "\nlogger = ", "\ndef get_tp_group(): ...\n\nlogger = "),
        ],
        ["`get_tp_group` from `vllm.distributed.parallel_state`", f"is defined in {UTILS}"],
    ),
    "a base class gone": (
        [Edit(BASE, "class KVConnectorBase_V1(", "class KVConnectorBase_V2(")],
        ["Could not import `KVConnectorBase_V1`", "it is defined nowhere"],
    ),
    "vLLM's own connector calls what ours has not got": (
        [Edit(IN_TREE, f"{SHIM_CALL}.take_events(", f"{SHIM_CALL}.take_all_events(")],
        ["`FlexKVConnectorV1Impl` has no attribute `take_all_events`"],
    ),
    "vLLM's own connector passes an argument more": (
        [Edit(IN_TREE, f"{SHIM_CALL}.get_finished(", f"{SHIM_CALL}.get_finished(0, ")],
        ["WorkerCalls.get_finished"],
    ),
    "a method more that an offloading worker must have": (
        [one_more(OFFLOAD, "submit_store", "halt")],
        ["offloading.worker.FlexKVOffloadingWorker", "abstract: `halt`"],
    ),
    "an argument more for a method of an offloading manager": (
        [Edit(OFFLOAD, "def complete_load(self, ", "def complete_load(self, rank: int, ")],
        ["`FlexKVOffloadingManager.complete_load`"],
    ),
    "what an offloading spec is made with renamed": (
        [Edit(OFFLOAD_CONFIG, "    dcp_size: int", "    context_size: int")],
        ["offloading/spec.py", "`dcp_size`"],
    ),
    "what an offloading manager answers renamed": (
        [Edit(OFFLOAD, "HIT_PENDING", "HIT_LATER")],
        ["offloading/request.py", "`HIT_PENDING`"],
    ),
    "vLLM's own connector imports another name": (
        [Edit(IN_TREE, "FlexKVConnectorV1Impl", "FlexKVConnectorV2Impl")],
        ["`FlexKVConnectorV2Impl`"],
    ),
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return matrix.load()["vllm"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Tree:
    """The installed vLLM's Python files, as links."""
    found = importlib.util.find_spec(engine.package)
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    path = tmp_path_factory.mktemp("engine")
    source = Path(found.origin).parent
    for file in source.rglob("*.py"):
        link = path / engine.package / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    names = metadata.packages_distributions()[engine.package]
    return Tree(path, metadata.version(names[0]))


@contextlib.contextmanager
def changed(tree: Tree, edits: list[Edit]) -> Iterator[None]:
    """Files in place of links, until the end of the block."""
    links = {tree.path / edit.file: (tree.path / edit.file).readlink() for edit in edits}
    for edit in edits:
        file = tree.path / edit.file
        code = file.read_text(encoding="utf-8")
        assert edit.old in code, f"{edit.file} has no {edit.old!r} to change"
        file.unlink()
        file.write_text(code.replace(edit.old, edit.new), encoding="utf-8")
    yield
    for file, link in links.items():
        file.unlink()
        file.symlink_to(link)


ALONE = (
    "an abstract method renamed",
    "an import moved",
    "a base class gone",
    "vLLM's own connector imports another name",
)
"""Of `BREAKS`: they hide others, or change the same line."""


@pytest.fixture(scope="module")
def said(engine: Engine, tree: Tree) -> dict[str, str]:
    """What is said of each change; of all that hide no other, at once."""
    found = {}
    for group in ([what for what in BREAKS if what not in ALONE], *([what] for what in ALONE)):
        with changed(tree, [edit for what in group for edit in BREAKS[what][0]]):
            text = "\n".join(map(str, check(engine, tree, engine.accepted)))
        found.update(dict.fromkeys(group, text))
    return found


def test_the_installed_version_fits(engine: Engine, tree: Tree) -> None:
    assert check(engine, tree, engine.accepted) == []


@pytest.mark.parametrize("what", BREAKS)
def test_a_change_of_vllm_is_named(said: dict[str, str], what: str) -> None:
    for name in BREAKS[what][1]:
        assert name in said[what]


def test_vllms_connector_gone_is_noticed(engine: Engine, tree: Tree) -> None:
    gone = replace(engine, callers=("vllm/gone.py",))
    with pytest.raises(FileNotFoundError, match="gone"):
        check(gone, tree, engine.accepted)
