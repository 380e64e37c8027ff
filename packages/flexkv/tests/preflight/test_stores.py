# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_s3 import SECRET, URL, FaultyS3

from flexkv.preflight.checks import check_store
from flexkv.preflight.findings import Finding, Level
from flexkv.settings import CacheConfig
from flexkv.tiers import mooncake, objects
from flexkv.tiers.shared_store import all_stores, shared_stores


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    made = FaultyS3(monkeypatch)
    yield made
    made.close()


def asked() -> Finding:
    (found,) = check_store(CacheConfig(objects_url=URL, objects_timeout_seconds=2), objects.STORE)
    assert bool(found.change) is (found.level is Level.PROBLEM)
    return found


def test_a_bucket_that_answers_is_fine_and_nothing_is_written(bucket: FaultyS3) -> None:
    assert asked() == Finding("objects", Level.OK, "objects_url answers")
    assert not bucket.objects
    assert {method for method, _ in bucket.requests} == {"GET"}


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (404, "NoSuchBucket", "NoSuchBucket"),
        (403, "AccessDenied", "403"),
        (500, "InternalError", "500"),
    ],
)
def test_a_bucket_that_refuses_is_a_problem(
    bucket: FaultyS3, status: int, code: str, said: str
) -> None:
    bucket.fault = lambda *_: (status, code)
    found = asked()
    assert found.level is Level.PROBLEM
    assert said in found.text
    assert SECRET not in found.text


def test_a_bucket_that_is_not_there_is_a_problem(bucket: FaultyS3) -> None:
    bucket.close()
    found = asked()
    assert found.level is Level.PROBLEM
    assert "objects_url cannot be used" in found.text


def test_a_shared_folder_answers(tmp_path: Path) -> None:
    (found,) = check_store(CacheConfig(objects_url=f"file://{_private(tmp_path)}"), objects.STORE)
    assert found.level is Level.OK
    assert not list((tmp_path / "kv").iterdir())


def test_servers_of_mooncake_that_do_not_answer_are_problems() -> None:
    pytest.importorskip("mooncake")
    config = CacheConfig(
        mooncake_master="127.0.0.1:9", mooncake_metadata="http://127.0.0.1:9/metadata"
    )
    found = list(check_store(config, mooncake.STORE))
    assert [each.level for each in found] == [Level.PROBLEM] * 2
    assert "mooncake_master 127.0.0.1:9 cannot be used" in found[0].text
    assert "mooncake_metadata http://127.0.0.1:9/metadata cannot be used" in found[1].text


def test_stores_that_are_not_set_are_not_asked() -> None:
    assert list(shared_stores(CacheConfig())) == []
    assert [each.setting for each in all_stores()] == ["mooncake_master", "objects_url"]


def _private(folder: Path) -> Path:
    (folder / "kv").mkdir(mode=0o700)
    return folder / "kv"
