# SPDX-License-Identifier: Apache-2.0
"""SGLang's request, by the names that FlexKV has for its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast


class SglangRequest:
    """See `flexkv.engine.scheduler.engine.EngineRequest`.

    Args:
        request: SGLang's request; borrowed.

    Attributes:
        sglang: as given.
        block_hashes: none; `PageHashes` makes them.
    """

    block_hashes: Sequence[bytes] = ()

    def __init__(self, request: Any) -> None:
        self.sglang = request

    @property
    def request_id(self) -> str:
        """SGLang's `rid`."""
        return cast("str", self.sglang.rid)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return self.num_prompt_tokens + len(self.sglang.output_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.sglang.origin_input_ids)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV SGLang has when it begins the next step of the request."""
        return cast("int", self.sglang.prefix_len)

    @property
    def kv_transfer_params(self) -> Any:
        """The user's parameters."""
        return getattr(self.sglang.sampling_params, "custom_params", None)

    @property
    def cache_salt(self) -> str | None:
        """Salt of the tenant; None if there is none."""
        return cast("str | None", self.sglang.cache_salt)

    @property
    def session_id(self) -> object:
        """The name of the conversation; None if there is none."""
        return self.sglang.session_id

    @property
    def kv_hints(self) -> object:
        """Hints in vLLM's form, which SGLang takes too; None if there are none."""
        return getattr(self.sglang, "kv_hints", None)
