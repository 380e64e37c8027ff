# SPDX-License-Identifier: Apache-2.0
"""An engine that begins empty beside blocks of its model says which part of the fingerprint keeps
it from them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from disk_blocks import names, opened

from flexkv.tiers.disk.folder import IDENTITY
from flexkv.tiers.disk.removal import Removal, remove

ONE, OTHER, THIRD = "1" * 32, "2" * 32, "3" * 32
PARTS = ("engine: vllm 1", "weights: w", "configuration: c", "block size: 16")


def use(root: Path, fingerprint: str, identity: Sequence[str], blocks: int = 2) -> None:
    """An engine opens its folder, writes blocks and ends."""
    with opened(root, fingerprint=fingerprint, identity=identity) as client:
        client.write(names(blocks))


def told(root: Path, caplog: pytest.LogCaptureFixture, identity: Sequence[str]) -> str:
    """What an engine without blocks logs of other folders."""
    caplog.clear()
    with (
        caplog.at_level(logging.WARNING, "flexkv.tiers.disk"),
        opened(root, fingerprint=THIRD, identity=identity),
    ):
        return caplog.text


def test_the_parts_are_text_beside_the_blocks(tmp_path: Path) -> None:
    use(tmp_path, ONE, [*PARTS, "code: two\nlines"])
    text = (tmp_path / ONE / IDENTITY).read_text()
    assert text.splitlines() == [*PARTS, "code: two lines"]


def test_the_parts_that_differ_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    use(tmp_path, ONE, PARTS)
    text = told(tmp_path, caplog, ["engine: vllm 2", *PARTS[1:3], "block size: 16", "hash seed: 0"])
    assert f"{tmp_path / ONE} has blocks of this model under another fingerprint" in text
    assert "engine ('vllm 1' there, 'vllm 2' here); hash seed (not set there, '0' here)" in text
    assert "block size" not in text


def test_the_nearest_folder_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    use(tmp_path, ONE, ["engine: vllm 0", *PARTS[1:3], "block size: 32"])
    use(tmp_path, OTHER, [*PARTS[:3], "block size: 32"])
    text = told(tmp_path, caplog, PARTS)
    assert f"{tmp_path / OTHER} has blocks" in text
    assert str(tmp_path / ONE) not in text


def test_other_weights_of_a_configuration_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use(tmp_path, ONE, PARTS)
    text = told(tmp_path, caplog, [PARTS[0], "weights: others", *PARTS[2:]])
    assert "blocks of a model of this configuration" in text
    assert "weights ('w' there, 'others' here)" in text


@pytest.mark.parametrize(
    ("identity", "blocks"),
    [
        (["engine: vllm 1", "weights: others", "configuration: others"], 2),
        (PARTS, 0),
        ([], 2),
    ],
    ids=["another model", "no blocks", "no parts"],
)
def test_nothing_is_said_of_other_folders(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, identity: Sequence[str], blocks: int
) -> None:
    use(tmp_path, ONE, identity, blocks)
    assert "begins empty" not in told(tmp_path, caplog, PARTS)


def test_a_warm_engine_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    use(tmp_path, ONE, PARTS)
    use(tmp_path, THIRD, [*PARTS[:3], "block size: 32"])
    assert "begins empty" not in told(tmp_path, caplog, [*PARTS[:3], "block size: 32"])


def test_what_others_wrote_is_shown_as_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user may own the folder: no line of the log is theirs, however long the value."""
    use(tmp_path, ONE, PARTS)
    forged = tmp_path / ONE / IDENTITY
    forged.write_bytes(b"weights: w\nengine: \x1b[31m\r" + b"x" * 9000 + b"\nlast: 1")
    text = told(tmp_path, caplog, PARTS)
    assert "engine ('\\x1b[31m" in text
    assert "\x1b" not in text
    assert "x" * 61 not in text


def test_a_link_in_place_of_the_file_is_neither_read_nor_written_through(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use(tmp_path, ONE, PARTS)
    foreign = tmp_path / "foreign"
    foreign.write_text("\n".join(PARTS))
    for link in (os.symlink, os.link):
        (tmp_path / ONE / IDENTITY).unlink()
        link(foreign, tmp_path / ONE / IDENTITY)
        if link is os.symlink:
            assert "begins empty" not in told(tmp_path, caplog, [*PARTS[:3], "block size: 32"])
        use(tmp_path, ONE, [*PARTS[:3], "block size: 1"])
        assert foreign.read_text() == "\n".join(PARTS)


def test_a_folder_goes_with_its_file(tmp_path: Path) -> None:
    use(tmp_path, ONE, PARTS)
    assert remove(str(tmp_path / ONE)) is Removal.REMOVED
    assert list(tmp_path.iterdir()) == []
