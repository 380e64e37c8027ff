# SPDX-License-Identifier: Apache-2.0
"""A plugin that puts the campaign's faults into an engine's processes.

`install` writes the metadata of a distribution with one entry point into a folder; with that on
PYTHONPATH the engine calls `register` in each of its processes, as it does with FlexKV's own
plugin.
"""

from __future__ import annotations

import importlib
import inspect
import os
from pathlib import Path
from typing import Any

from integration.campaign.faults import Steering

FOLDER = "KV_CAMPAIGN_FOLDER"
"""The environment variable that names the folder of orders."""
_METADATA = "Metadata-Version: 2.1\nName: flexkv-campaign\nVersion: 0\n"
VLLM, SGLANG = "vllm.general_plugins", "sglang.srt.plugins"
"""Where the engines look for plugins."""


def install(
    folder: Path, orders: Path, python_path: str, group: str = VLLM, module: str = __name__
) -> dict[str, str]:
    """Make the plugin known.

    Args:
        folder: receives its metadata.
        orders: folder of the `OrderBook` that it obeys.
        python_path: the engine's PYTHONPATH without it; the repository must be on it.
        group: of entry points, where the engine looks.
        module: whose `register` the engine calls.

    Returns:
        What to add to the engine's environment.
    """
    info = folder / "flexkv_campaign-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(_METADATA)
    entry_point = f"[{group}]\nflexkv-campaign = {module}:register\n"
    (info / "entry_points.txt").write_text(entry_point)
    return {"PYTHONPATH": os.pathsep.join((str(folder), python_path)), FOLDER: str(orders)}


def register() -> None:
    """Put the faults between FlexKV and its mover and files. Once in each process."""
    pages: Any = importlib.import_module("flexkv_kernels.host_memory").HostMemory
    tiers: Any = importlib.import_module("flexkv.open_tiers")

    if getattr(pages.make_mover, "steered", False):
        return  # an engine loads plugins again where a process makes several engines
    steering = Steering(Path(os.environ[FOLDER]))
    make_mover, open_disk_tier = pages.make_mover, tiers.open_disk_tier

    def make_steered_mover(*args: Any, **kwargs: Any) -> Any:
        from integration.campaign.steered_mover import SteeredMover

        inner = make_mover(*args, **kwargs)
        if not _is_last_rank():
            return inner
        given = inspect.signature(make_mover).bind(*args, **kwargs).arguments
        planes, stored, arena = given["planes"], given["stored"], given["arena"]
        return SteeredMover(inner, planes, stored, arena.address, steering)

    def open_steered_tier(*args: Any, **kwargs: Any) -> Any:
        from integration.campaign.steered_files import SteeredFiles

        return open_disk_tier(*args, **kwargs, files=SteeredFiles(steering))

    make_steered_mover.steered = True  # type: ignore[attr-defined]
    pages.make_mover = make_steered_mover
    tiers.open_disk_tier = open_steered_tier


def _is_last_rank() -> bool:
    """Copies fail on one rank only: a block that the others have must not count, either."""
    distributed: Any = importlib.import_module("torch.distributed")
    last: bool = distributed.get_rank() == distributed.get_world_size() - 1
    return last
