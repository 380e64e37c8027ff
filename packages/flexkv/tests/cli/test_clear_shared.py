# SPDX-License-Identifier: Apache-2.0
"""`flexkv clear` and real shared stores, with nodes that run meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'flexkv[objects]'")
pytest.importorskip("moto", reason="moto is not installed: pip install moto flask flask-cors")

import obstore
from shared_node import FINGERPRINT, Remote

from flexkv.tiers.objects.open_objects import connect
from integration.harness.s3_server import BUCKET, S3Server
from packages.conftest import PATIENCE_SECONDS
from packages.flexkv.tests.cli.stores import Cache, Flexkv
from packages.patience import patient_objects

URL = f"s3://{BUCKET}/cleared"
Start = Callable[[], Remote]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as found:
        yield found


@pytest.fixture
def start(server: S3Server, monkeypatch: pytest.MonkeyPatch, at_end: ExitStack) -> Start:
    """Nodes; the command has the same settings."""
    for name, value in (server.environ | {"FLEXKV_OBJECTS_URL": URL}).items():
        monkeypatch.setenv(name, value)
    settings = patient_objects(URL)
    return lambda: at_end.enter_context(closing(Remote(settings, server.environ)))


def test_nothing_of_before_is_found_and_running_nodes_go_on_sharing(
    start: Start, flexkv: Flexkv
) -> None:
    one, other = start(), start()
    one.do("store", "abc")
    dry = flexkv("clear", "stores", "all", "--dry-run")
    assert (dry.code, dry.out) == (0, f"would clear {URL}, fingerprint {FINGERPRINT}\n")
    assert start().do("fetch", "abc") == "abc"
    ended = flexkv("clear", "stores", "all", "--yes")
    assert (ended.code, ended.out) == (0, f"cleared {URL}, fingerprint {FINGERPRINT}\n")
    assert other.do("fetch", "abc") == ""
    assert start().do("fetch", "abc") == ""
    one.do("store", "xyz")
    assert other.do("fetch", "xyz") == "xyz"
    assert start().do("fetch", "xyz") == "xyz"


def test_a_directory_on_the_command_line_leaves_shared_stores_alone(
    start: Start, flexkv: Flexkv, cache: Cache
) -> None:
    cache.fill(1)
    start().do("store", "def")
    ended = flexkv("clear", "folders", cache.root, "--yes")
    assert ended.code == 0
    assert not cache.folder.exists()
    assert start().do("fetch", "def") == "def"


def test_other_fingerprints_are_left_alone_if_one_is_given(start: Start, flexkv: Flexkv) -> None:
    start().do("store", "ghi")
    ended = flexkv("clear", "stores", "0" * 32, "--yes")
    said = f"nothing to clear in {URL}, fingerprint {'0' * 32}\n"
    assert (ended.code, ended.out) == (1, said)
    assert start().do("fetch", "ghi") == "ghi"


def test_what_is_no_record_of_ours_is_left_alone(start: Start, flexkv: Flexkv) -> None:
    start()
    store = connect(URL, PATIENCE_SECONDS)
    obstore.put(store, "epochs/readme", b"mine")
    ended = flexkv("clear", "stores", "all", "--yes")
    assert (ended.code, ended.out) == (0, f"cleared {URL}, fingerprint {FINGERPRINT}\n")
    assert bytes(obstore.get(store, "epochs/readme").bytes()) == b"mine"
    obstore.delete(store, "epochs/readme")


def test_a_bucket_that_does_not_answer_is_named(
    start: Start, flexkv: Flexkv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    ended = flexkv("clear", "stores", "all", "--yes")
    assert ended.code == 2
    assert f"objects_url is '{URL}', which cannot be listed" in ended.err
    ended = flexkv("clear", "stores", FINGERPRINT, "--yes")
    assert ended.code == 1
    assert f"skipped {URL}, fingerprint {FINGERPRINT}: GenericError: " in ended.out
    assert "Connection refused" in ended.out


@pytest.mark.parametrize("metadata", [True, False], ids=["metadata server", "none"])
def test_mooncake_is_cleared_by_fingerprint(
    flexkv: Flexkv, monkeypatch: pytest.MonkeyPatch, metadata: bool
) -> None:
    pytest.importorskip(
        "mooncake.store",
        reason="Mooncake is not installed: pip install 'flexkv[mooncake]'",
        exc_type=ImportError,
    )
    from integration.harness.mooncake_master import MooncakeMaster

    master = MooncakeMaster(metadata=metadata)
    made: list[Remote] = []

    def start() -> Remote:
        patient = dict.fromkeys(
            ("mooncake_question_seconds", "mooncake_timeout_seconds"), PATIENCE_SECONDS
        )
        made.append(Remote(master.settings | patient, {}))
        return made[-1]

    for setting in ("mooncake_master", "mooncake_metadata"):
        monkeypatch.setenv(f"FLEXKV_{setting.upper()}", master.settings[setting])
    try:
        one, other = start(), start()
        one.do("store", "abc")
        ended = flexkv("clear", "stores", "all", "--yes")
        assert ended.code == 2
        assert "NAME is 'all' on the command line, and mooncake at" in ended.err
        ended = flexkv("clear", "stores", FINGERPRINT, "--yes")
        store = master.settings["mooncake_master"]
        assert (ended.code, ended.out) == (0, f"cleared {store}, fingerprint {FINGERPRINT}\n")
        assert other.do("fetch", "abc") == ""
        one.do("store", "xyz")
        assert other.do("fetch", "xyz") == "xyz"
    finally:
        for node in made:
            node.kill()
        master.kill()
