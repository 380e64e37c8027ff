# SPDX-License-Identifier: Apache-2.0
"""Which drive writes the next block of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flexkv.tiers.disk.drive import Drive


class WritePlacement:
    """Distributes the blocks of one batch over drives: each to the drive that is expected to write
    it first. The caller reserves a slot of the index of the drive that `next` returns before it
    calls again. If one policy evicts from all drives, those with a free slot write; if there is
    none, that of the block that leaves next, if it has room.
    """

    def __init__(self, drives: Iterable[Drive], *, has_policy: bool) -> None:
        self._rooms = {drive: room for drive in drives if (room := drive.room)}
        self._seconds = {
            drive: 0.0 if drive.is_outdated else drive.write_seconds(1) for drive in self._rooms
        }
        self._given = dict.fromkeys(self._rooms, 0)
        self._has_policy = has_policy and len(self._rooms) > 1

    def next(self) -> Drive | None:
        """The drive of the next block; None if no drive has room."""
        seconds = self._seconds
        if not seconds:
            return None
        fitting = self._by_policy() if self._has_policy else ()
        drive = min(fitting or seconds, key=seconds.__getitem__)
        self._given[drive] += 1
        seconds[drive] = drive.write_seconds(self._given[drive] + 1)
        if self._given[drive] == self._rooms[drive]:
            del seconds[drive]
        return drive

    def _by_policy(self) -> Sequence[Drive]:
        """The drives that may write without a loss that the policy would not choose."""
        with_room = [each for each in self._seconds if each.index.has_room]
        return with_room or [each for each in self._seconds if each.index.has_victim]

    def leave_out(self, drive: Drive) -> None:
        """Give the drive no further block: it has no slot for one."""
        self._seconds.pop(drive, None)
