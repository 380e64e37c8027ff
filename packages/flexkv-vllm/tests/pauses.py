# SPDX-License-Identifier: Apache-2.0
"""How far vLLM is with its steps when it begins its running requests anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_world import World


def pause(world: World) -> bool:
    """Finish the steps that were scheduled, as vLLM does when it is paused.

    An asynchronous scheduler before 0.22 then drops the next token of each request: it takes it for
    one that was under way. So there vLLM is not paused, and one step is under way.

    Returns:
        False if a token would be lost all the same: of a request that this step gives none, or of
        one that gets several.
    """
    running = world.scheduler.running
    if world.lag is None or not any(
        hasattr(each, "discard_latest_async_tokens") for each in running
    ):
        while world.steps:
            world.finish_step()
        return True
    return all(request.num_output_placeholders == 1 for request in running)
