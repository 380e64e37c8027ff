# SPDX-License-Identifier: Apache-2.0
"""What an adapter's parts need of an engine: a request, and the engine's own prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from flexkv.adapter.groups import Group


class EngineRequest(Protocol):
    """A request as its engine keeps it; read, never changed.

    Attributes:
        request_id: unique among the requests that have not ended.
        num_tokens: of the prompt and of the answer so far.
        num_prompt_tokens: of the prompt.
        num_computed_tokens: whose KV the engine has, or computes in the steps under way.
        block_hashes: of its complete blocks, in order; each covers all tokens before it too.
        kv_transfer_params: what the user asks of FlexKV; see `request_options`.
        cache_salt: of the tenant; None if there is none.
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
        """Whether the engine has the block of that hash in one of its groups."""
        ...

    def forget(self, engine_blocks: set[int]) -> None:
        """Take these blocks out of the engine's prefix cache: they do not hold what they should."""
        ...


Describe = Callable[[Any, Group, Iterable[tuple[int, bytes]]], None]
"""Told which blocks of a request, by position and key, are being stored or have come."""
