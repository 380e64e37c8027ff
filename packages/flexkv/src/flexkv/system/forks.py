# SPDX-License-Identifier: Apache-2.0
"""Closes a forked child's copies of its parent's resources.

A fork copies every descriptor. A child that outlives its parent would keep the parent's locks and
sockets, so that they look owned, and its shared memory, so that the kernel cannot free it.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Owner(Protocol):
    """An object with descriptors or memory of its process."""

    def leave_to_parent(self) -> None:
        """In a forked child: close the inherited resources, without a change to those of the
        parent. Takes no locks: a thread that is not in the child may hold them."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def close_in_children(owner: Owner) -> None:
    """Call `owner.leave_to_parent` in every child that this process forks while the owner lives.

    A child that runs another program does not need it: descriptors close on exec.
    """
    _owners.add(owner)


def _leave_all() -> None:
    for owner in list(_owners):
        owner.leave_to_parent()
    _owners.clear()


os.register_at_fork(after_in_child=_leave_all)
