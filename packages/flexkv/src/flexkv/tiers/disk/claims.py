# SPDX-License-Identifier: Apache-2.0
"""Takes a folder in each cache directory at a start. A hung mount or drive does not block it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from flexkv.deadline import ANSWER_SECONDS, HANGS, HungError, call_beside, call_within
from flexkv.errors import DiskError
from flexkv.tiers.disk.directory import Folder, claim
from flexkv.tiers.disk.exposure import close_to_others
from flexkv.tiers.disk.files import reason_of
from flexkv.tiers.disk.store import check_table

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def claim_all(roots: Sequence[str], fingerprint: str, share: bool) -> dict[str, Folder]:
    """Own a folder in each directory that answers within `ANSWER_SECONDS`; log the others.

    The time limit covers a few calls on small files: they create directory and folder, lock the
    folder, read the header of its table and set the modes of the files. Work that takes longer is
    for `work_in`.

    Args:
        roots: absolute paths of the cache directories, created if they are missing.
        fingerprint: fingerprint of the blocks, hexadecimal.
        share: whether to create a folder with a number if another engine owns the first one. If
            not, that is an error.

    Returns:
        The folders, by directory and in the order of `roots`. The caller owns and releases them. A
        folder whose directory answers later is released at once.

    Raises:
        DiskError: no directory answers, or a folder cannot be owned; see `claim` and `check_table`.
            No folder is left owned.
    """
    calls = {root: functools.partial(_claim, root, fingerprint, share) for root in roots}
    claimed = call_within(calls, ANSWER_SECONDS, late=_release)
    errors = [each for each in claimed.values() if isinstance(each, DiskError)]
    if errors:
        for each in claimed.values():
            _release(each)
        raise errors[0]
    if not claimed:
        raise none_answers(roots)
    for root in roots:
        if root not in claimed:
            _log_silent(root)
    return {root: each for root, each in claimed.items() if isinstance(each, Folder)}


def work_in(
    folders: dict[str, Folder], root: str, work: Callable[[Folder], Result]
) -> Result | None:
    """Work in the folder of a directory, for as long as its file system answers.

    Args:
        folders: the folders of `claim_all`. If the directory does not answer any more, its folder
            is taken out of them, and this is logged. The work may use the folder as long as it
            hangs, so the folder stays open and locked until the process ends.
        root: the directory.
        work: uses the folder; runs in a thread of its own.

    Returns:
        The result of `work`; None if the directory hangs. An error of `work` is raised, whatever
        its type.
    """
    folder = folders.pop(root)
    ended = hangs = False

    def run() -> Result:
        nonlocal ended
        try:
            return work(folder)
        finally:
            ended = True

    try:
        return call_beside(folder.path, run, ANSWER_SECONDS)
    except HungError:
        hangs = True
        _log_silent(root)
        return None
    finally:
        if ended and not hangs:
            folders[root] = folder


def none_answers(roots: Sequence[str]) -> DiskError:
    """Make the error of a start of whose directories none answers."""
    return DiskError(
        f"{';'.join(roots)} from ssd_cache_dir has not answered for {ANSWER_SECONDS:g} s: "
        f"{HANGS}; allowed: directories of which at least one answers"
    )


def _log_silent(root: str) -> None:
    logger.error(
        "%s from ssd_cache_dir has not answered for %g s; FlexKV starts without it and its part of "
        "ssd_cache_gb: %s, and restart the engine when it answers",
        root,
        ANSWER_SECONDS,
        HANGS,
    )


def _claim(root: str, fingerprint: str, share: bool) -> Folder | DiskError:
    """Own the folder below one directory, or say why not."""
    try:
        with contextlib.ExitStack() as undo:
            folder = claim(root, fingerprint, share)
            undo.callback(folder.release)
            check_table(folder)
            close_to_others(folder)
            undo.pop_all()
            return folder
    except DiskError as error:
        return error
    except OSError as error:
        return DiskError(
            f"cannot use {root} from ssd_cache_dir: {reason_of(error)}; allowed: a directory that "
            f"this user can create, read and write"
        )


def _release(claimed: Folder | DiskError) -> None:
    if isinstance(claimed, Folder):
        claimed.release()
