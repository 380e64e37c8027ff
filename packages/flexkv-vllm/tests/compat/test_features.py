# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_offload.base import OffloadingManager

import flexkv.engine
import flexkv_vllm
from flexkv_vllm.compat.features import CALLS, FIELDS, missing_features
from flexkv_vllm.connector import FlexKVConnectorV1
from flexkv_vllm.intree_connector import FlexKVConnectorV1Impl
from flexkv_vllm.offloading.manager import FlexKVOffloadingManager
from flexkv_vllm.offloading.tier import FlexKVTier

OWNERS = sorted(FIELDS)


def lacking() -> list[str]:
    return missing_features(FlexKVConnectorV1)


@pytest.mark.parametrize(
    "ours", [FlexKVConnectorV1, FlexKVConnectorV1Impl, FlexKVOffloadingManager, FlexKVTier]
)
def test_the_installed_vllm_lacks_nothing(ours: type) -> None:
    assert missing_features(ours) == []


@pytest.mark.parametrize("owner", OWNERS, ids=[name for _, name in OWNERS])
def test_fields_that_are_gone_are_named(
    owner: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = owner
    monkeypatch.setattr(importlib.import_module(module), name, type(name, (), {}))
    missing = lacking()
    assert {f"{module}.{name}.{field}" for field in FIELDS[owner]} <= set(missing)


@pytest.mark.parametrize("owner", OWNERS, ids=[name for _, name in OWNERS])
def test_a_class_that_is_gone_is_named(
    owner: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = owner
    monkeypatch.delattr(importlib.import_module(module), name)
    assert f"{module}.{name}" in lacking()


@pytest.mark.parametrize("call", sorted(CALLS), ids=[name for _, name in sorted(CALLS)])
def test_a_call_that_takes_more_is_named(
    call: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = call
    *classes, function = name.split(".")
    owner: Any = importlib.import_module(module)
    for part in classes:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, function, lambda a, b, c, d: None)
    assert any(each.startswith(f"{module}.{name} with") for each in lacking())


def test_a_method_that_passes_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_future(self: object, finished_req_ids: set[str], more: int) -> None: ...

    monkeypatch.setattr(KVConnectorBase_V1, "get_finished", in_future)
    (missing,) = lacking()
    assert missing.startswith("KVConnectorBase_V1.get_finished(self")


def test_a_call_of_the_manager_that_passes_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_future(self: object, key: bytes, req_context: object, more: int) -> None: ...

    monkeypatch.setattr(OffloadingManager, "lookup", in_future)
    (missing,) = missing_features(FlexKVOffloadingManager)
    assert missing.startswith("OffloadingManager.lookup(self")
    assert lacking() == []


def test_a_method_that_must_be_answered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlexKVConnectorV1, "__abstractmethods__", frozenset({"in_future"}))
    assert lacking() == ["an answer to in_future"]


def test_every_name_is_one_that_the_adapter_uses() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for package in (flexkv_vllm, flexkv.engine)
        for path in Path(package.__path__[0]).rglob("*.py")
        if path.name != "features.py"
    ]
    named = [*chain.from_iterable(FIELDS.values()), *(name.split(".")[-1] for _, name in CALLS)]
    unread = [each for each in named if not any(each in source for source in sources)]
    assert unread == []
