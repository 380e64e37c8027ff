# SPDX-License-Identifier: Apache-2.0
"""Prompts with images: the placeholder tokens of all images are alike, their blocks are not.

FlexKV knows nothing of images. Its keys are vLLM's block hashes, and those cover what an image is
by the hash that vLLM's processor gave it.
"""

from __future__ import annotations

import random

from engine_world import MakeWorld, World, random_prompt
from kv_pages import BLOCK_TOKENS
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

BEFORE, IMAGE, AFTER = 4 * BLOCK_TOKENS, 3 * BLOCK_TOKENS, 5 * BLOCK_TOKENS
PLACEHOLDER = 7
ENCODER_TOKENS = 1000


def with_encoder(world: World) -> World:
    """Its model is a text model: give its scheduler the budget that a multimodal one has."""
    scheduler = world.scheduler
    scheduler.max_num_encoder_input_tokens = ENCODER_TOKENS
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=ENCODER_TOKENS)
    return world


def see(world: World, prompt: list[int], image: str) -> int:
    """Have `prompt` computed with `image` in it; how many tokens were loaded."""
    where = PlaceholderRange(offset=BEFORE, length=IMAGE)
    images = [MultiModalFeatureSpec(None, "image", image, where)]
    request_id = world.add(prompt, max_tokens=2, images=images)
    world.run()
    world.forget()
    return world.external_tokens[request_id]


def test_two_images_with_the_same_placeholders_share_what_comes_before_them(
    make_world: MakeWorld,
) -> None:
    rng = random.Random(1)
    world = with_encoder(make_world(budget=512))
    prompt = random_prompt(rng, BEFORE) + [PLACEHOLDER] * IMAGE + random_prompt(rng, AFTER)
    assert see(world, prompt, "a cat") == 0
    assert see(world, prompt, "a dog") == BEFORE
    assert see(world, prompt, "a cat") == len(prompt)
    assert see(world, prompt, "a dog") == len(prompt)
    assert see(world, prompt, "a cow") == BEFORE
