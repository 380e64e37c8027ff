# SPDX-License-Identifier: Apache-2.0
"""SGLang's page hashes, which are FlexKV's keys, tell tenants, adapters and images apart."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.sampling.sampling_params import SamplingParams

from flexkv.operators.verbs import PromptQuestion
from flexkv_sglang import keys as page_keys_module
from flexkv_sglang.hashes import PageHashes
from flexkv_sglang.keys import PageKeys

TEXT = list(range(48))
# SGLang puts numbers of 62 bits of an image's digest in the place of its tokens.
IMAGE = [1_000_000 + (1 << 40)] * 16


def hashes(tokens: list[int], **request: str) -> list[str]:
    made = Req("rid", "", array("q", tokens), SamplingParams(), **request)
    key = RadixKey(made.origin_input_ids, extra_key=made.extra_key, cache_salt=made.cache_salt)
    found: list[str] = get_storage_hash_str(key, None, page_size=16)
    return found


def test_no_page_of_one_is_a_page_of_another() -> None:
    found = {
        "text": hashes(TEXT),
        "extra_key A": hashes(TEXT, extra_key="A"),
        "extra_key B": hashes(TEXT, extra_key="B"),
        "cache_salt A": hashes(TEXT, cache_salt="A"),
        "cache_salt B": hashes(TEXT, cache_salt="B"),
        "both": hashes(TEXT, extra_key="A", cache_salt="A"),
        "adapter 1": hashes(TEXT, lora_id="1" * 32),
        "adapter 2": hashes(TEXT, lora_id="2" * 32),
        "adapter of a tenant": hashes(TEXT, lora_id="1" * 32, extra_key="A"),
        "image": hashes(IMAGE + TEXT),
        "other image": hashes([number + (1 << 50) for number in IMAGE] + TEXT),
        "another first token": hashes([99, *TEXT[1:]]),
    }
    pages = [page for each in found.values() for page in each]
    assert len(pages) == 10 * 3 + 2 * 4
    assert len(pages) == len(set(pages))
    assert all(len(bytes.fromhex(page)) == 32 for page in pages)


@pytest.mark.parametrize("part", [1, 32, 1024])
@pytest.mark.parametrize("salt", ["", "A"])
@pytest.mark.parametrize("is_bigram", [False, True])
def test_an_operators_prompt_has_the_keys_of_a_request(
    part: int, salt: str, is_bigram: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_keys_module, "_PART_TOKENS", part)
    page_keys = PageKeys()
    keys = page_keys.of_prompts(16, is_bigram=is_bigram)
    whole = RadixKey(array("q", TEXT), cache_salt=salt or None, is_bigram=is_bigram)
    expected = get_storage_hash_str(whole, None, page_size=16)[: 2 if is_bigram else 3]
    for _ in range(2):
        by_tokens = PromptQuestion(tokens=tuple(TEXT), cache_salt=salt)
        made = [bytes(key) for each in keys.parts(by_tokens) for key in each]
        assert made == [bytes.fromhex(each) + page_keys.epoch.end for each in expected]
        assert keys.count(by_tokens) == len(expected)
        by_hashes = PromptQuestion(hashes=tuple(expected))
        assert [bytes(key) for each in keys.parts(by_hashes) for key in each] == made
        page_keys.renew(mixed=False)
    assert list(keys.parts(PromptQuestion(tokens=(1, 2)))) == []


@pytest.mark.parametrize("known", [0, 1, 3])
@pytest.mark.parametrize("is_bigram", [False, True])
def test_a_request_that_ends_has_the_keys_of_its_lookups(known: int, is_bigram: bool) -> None:
    request = Req("rid", "", array("q", TEXT), SamplingParams(), cache_salt="A")
    request.output_ids.extend([*range(17), 99])  # the last token has no KV
    key = RadixKey(array("q", [*TEXT, *range(17)]), cache_salt="A", is_bigram=is_bigram)
    whole = get_storage_hash_str(key[:64], None, page_size=16)
    core = SimpleNamespace(is_eagle=is_bigram)
    made = PageHashes(SimpleNamespace(page_size=16, tree_core=core))
    before = whole[known - 1] if known else None
    assert made.behind(request, known, before) == whole[known:]
