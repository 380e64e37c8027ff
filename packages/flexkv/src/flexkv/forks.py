# SPDX-License-Identifier: Apache-2.0
"""What a forked child must not keep of its parent.

A fork copies every descriptor. A child that outlives its parent would keep the parent's locks and
sockets, so that they look owned, and its shared memory, so that the kernel cannot free it.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Owner(Protocol):
    """Something with descriptors or memory of its process."""

    def leave_to_parent(self) -> None:
        """In a forked child: close what was inherited, and change nothing that the parent still
        uses. Takes no locks: a thread that is not in the child may hold them."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def close_in_children(owner: Owner) -> None:
    """Have `owner.leave_to_parent` called in every child that this process forks, as long as the
    owner lives. Children that run another program need none of it: descriptors close on exec."""
    _owners.add(owner)


def _leave_all() -> None:
    for owner in list(_owners):
        owner.leave_to_parent()
    _owners.clear()


os.register_at_fork(after_in_child=_leave_all)
