# SPDX-License-Identifier: Apache-2.0
"""The parts of an engine that `flexkv.engine` uses: a request and the engine's prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from flexkv.engine.scheduler.groups import Group


class EngineRequest(Protocol):
    """The engine's own object for a request. FlexKV reads it and never changes it.

    Its id is unique among the requests that have not ended. `num_tokens` counts the prompt and the
    answer so far, `num_computed_tokens` those whose KV the engine has, or computes in the steps
    under way. `block_hashes` are those of its complete blocks, in order; each also covers all
    tokens before. `cache_salt` is that of the tenant; None if there is none.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    @property
    def kv_transfer_params(self) -> dict[str, Any] | None: ...
    @property
    def cache_salt(self) -> str | None: ...


class EnginePool(Protocol):
    """The engine's own prefix cache."""

    def has(self, block_hash: bytes, group: int) -> bool:
        """Whether the engine has the block of this hash in group number `group`."""
        ...

    def forget(self, engine_blocks: set[int]) -> None:
        """Remove these blocks from the engine's prefix cache, because their bytes are wrong."""
        ...

    def weights_changed(self, in_use: bool) -> None:
        """The engine's weights have changed: the blocks that it has now are not what it computes
        from here on. `in_use`: whether requests have blocks, which the engine may find later."""
        ...

    @property
    def may_find_old_blocks(self) -> bool:
        """Whether the engine has not reset its prefix cache since its weights changed."""
        ...


Describe = Callable[[Any, Group, Iterable[tuple[int, bytes]]], None]
"""Called with blocks of a request, by position and key, that are being stored or were fetched."""
