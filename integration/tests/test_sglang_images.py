# SPDX-License-Identifier: Apache-2.0
"""Images on a real SGLang with FlexKV: keys contain them, and loaded pages may end within one."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from integration.harness.checkpoint import TINY
from integration.harness.image_model import FIRST_WORD, IMAGE, random_image, write_image_model
from integration.sglang.plain_server import PlainServer
from integration.sglang.server import ServerConfig, SglangClient
from integration.tests.sglang_linked import ANSWER, Linked

FLAGS = {"skip_tokenizer_init": False}
CHUNK = 64
"""Tokens of a chunk of a prompt, fewer than those of an image."""
KV_TOKENS = 1024

LARGE, OTHER = (random_image(seed, 10, 10) for seed in range(2))
LARGE_TOKENS = 10 * 10
WIDE = random_image(2, 12, 5)
WIDE_TOKENS = 12 * 5
AROUND = 2
"""Tokens before and behind an image."""


def words(seed: str, count: int) -> str:
    drawn = random.Random(seed)
    return " ".join(f"w{drawn.randrange(FIRST_WORD, TINY.vocab)}" for _ in range(count))


class Asked(NamedTuple):
    """A prompt.

    Attributes:
        text, images: of it.
        known: how many tokens at its beginning earlier ones of the tests have.
    """

    text: str
    images: tuple[str, ...]
    known: int


WORDS = 40
BEHIND = words("behind", WORDS)
ONE, TWO = f"{IMAGE} {BEHIND}", f"{IMAGE} {BEHIND} {IMAGE} {BEHIND}"
# A prompt shares the token before its first image with all others.
PROMPTS = (
    Asked(ONE, (LARGE,), 0),
    Asked(ONE, (OTHER,), 1),
    Asked(ONE, (WIDE,), 1),
    Asked(TWO, (WIDE, OTHER), WIDE_TOKENS + AROUND + WORDS),
    Asked(TWO, (OTHER, WIDE), LARGE_TOKENS + AROUND + WORDS),
    Asked(BEHIND, (), 0),
)
OTHER_WORDS = Asked(f"{IMAGE} {words('other words', 50)}", (LARGE,), LARGE_TOKENS + AROUND)


class Given(NamedTuple):
    """An answer."""

    tokens: list[int]
    cached: int
    length: int


def ask(server: SglangClient, asked: Asked) -> Given:
    sampling = {"max_new_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
    body = {"text": asked.text, "image_data": [*asked.images], "sampling_params": sampling}
    answer = json.loads(server.ask("/generate", body))
    meta = answer["meta_info"]
    return Given(answer["output_ids"], meta["cached_tokens"], meta["prompt_tokens"])


@dataclass
class Images:
    """A server with FlexKV, and the answers of one without it.

    Attributes:
        linked: the server.
        page: tokens of a page.
        plain: the answers.
    """

    linked: Linked
    page: int
    plain: dict[Asked, list[int]]

    def ask(self, asked: Asked) -> Given:
        given = ask(self.linked.server, asked)
        assert given.tokens == self.plain[asked]
        self.linked.settle()
        return given

    def whole_pages(self, tokens: int) -> int:
        return tokens // self.page * self.page

    def check_all_restored(self) -> None:
        for asked in PROMPTS:
            self.linked.forget()
            given = self.ask(asked)
            assert given.cached == self.whole_pages(given.length - 1)


@pytest.fixture(scope="module")
def image_model(work_dir: Path) -> Path:
    return write_image_model(work_dir)


@pytest.fixture(scope="module")
def plain(
    tmp_path_factory: pytest.TempPathFactory, image_model: Path, sglang: Path
) -> dict[Asked, list[int]]:
    config = ServerConfig(image_model, TINY, chunked_prefill=CHUNK, flags=FLAGS, forked=True)
    answers = {}
    with PlainServer(config, tmp_path_factory.mktemp("images") / "plain.log") as server:
        for asked in (*PROMPTS, OTHER_WORDS):
            server.flush()
            answers[asked] = ask(server, asked).tokens
    assert len(set(map(tuple, answers.values()))) == len(answers), "images change no token"
    return answers


@pytest.fixture(scope="module", params=[16, 1], ids=["pages of 16", "pages of 1"])
def images(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    image_model: Path,
    plain: dict[Asked, list[int]],
) -> Iterator[Images]:
    linked = Linked(tmp_path_factory.mktemp("linked"), image_model, FLAGS)
    linked.start(forked=True, page_size=request.param, chunked_prefill=CHUNK, kv_tokens=KV_TOKENS)
    try:
        yield Images(linked, request.param, plain)
    finally:
        linked.close()


def test_images_share_nothing_and_come_back(images: Images) -> None:
    # With pages of 16 tokens, what is known of the last prompt ends within its image.
    for asked in (*PROMPTS, OTHER_WORDS):
        assert images.ask(asked).cached == images.whole_pages(asked.known)
        images.linked.forget()
    images.check_all_restored()


def test_images_of_an_earlier_server_come_back(images: Images) -> None:
    for asked in PROMPTS:
        images.ask(asked)
    images.linked.restart()
    images.check_all_restored()
