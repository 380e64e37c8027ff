# SPDX-License-Identifier: Apache-2.0
"""A server whose KV cache FlexKV keeps by SGLang's external linker, with faults on demand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from integration.campaign import plugin
from integration.campaign.faults import OrderBook
from integration.harness.checkpoint import ModelSpec
from integration.sglang import environment
from integration.sglang.server import ServerConfig

PAGE_TOKENS = 16


def linker_config(
    model: Path,
    spec: ModelSpec,
    settings: Mapping[str, str],
    folder: Path | None = None,
    **options: Any,
) -> ServerConfig:
    """A server with `--enable-flexkv`.

    Args:
        model: of the server.
        spec: of the model.
        settings: FlexKV's, as environment variables.
        folder: of `orders_in`, if something is to go wrong in this server.
        options: fields of the configuration, which win; `flags` are added.
    """
    env = dict(settings)
    if folder is not None:
        path = environment.python_path()
        env |= plugin.install(folder / "plugin", folder / "orders", path, plugin.SGLANG)
    flags = {"enable_flexkv": True, "enable_metrics": True, "enable_cache_report": True}
    flags |= options.pop("flags", {})
    fields = {"page_size": PAGE_TOKENS} | options
    return ServerConfig(model, spec, flags=flags, env=env, **fields)


def orders_in(folder: Path) -> OrderBook:
    """What the server of this folder obeys; to be made before it starts."""
    return OrderBook(folder / "orders")
