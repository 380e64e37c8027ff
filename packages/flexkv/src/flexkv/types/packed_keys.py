# SPDX-License-Identifier: Apache-2.0
"""Keys of a prefix in one piece of memory.

A prefix of 32,768 tokens in pages of one token has as many keys. An object of Python for each costs
a step of the engine more than to find their blocks. Calls of the cache that take a sequence of keys
take these without making such objects.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload


class PackedKeys(Sequence[bytes]):
    """Keys of equal length. Immutable; slices share the memory.

    The class is for annotations: `flexkv_kernels.block_index.pack_keys` makes objects of a native
    type.
    """

    @overload
    @abstractmethod
    def __getitem__(self, index: int, /) -> bytes: ...
    @overload
    @abstractmethod
    def __getitem__(self, index: slice, /) -> PackedKeys: ...
    @abstractmethod
    def __getitem__(self, index: int | slice, /) -> bytes | PackedKeys: ...

    @abstractmethod
    def __add__(self, other: PackedKeys, /) -> PackedKeys:
        """These keys followed by the others.

        Raises:
            ValueError: the others have another length.
        """
        ...
