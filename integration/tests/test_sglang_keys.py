# SPDX-License-Identifier: Apache-2.0
"""SGLang's page hashes, which are FlexKV's keys, tell tenants, adapters and images apart."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

_SCRIPT = """
import json
from array import array
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.sampling.sampling_params import SamplingParams

def hashes(tokens, **request):
    made = Req("rid", "", array("q", tokens), SamplingParams(), **request)
    key = RadixKey(made.origin_input_ids, extra_key=made.extra_key, cache_salt=made.cache_salt)
    return get_storage_hash_str(key, None, page_size=16)

text = list(range(48))
# SGLang puts numbers of 62 bits of an image's digest in the place of its tokens.
image = [1_000_000 + (1 << 40)] * 16
found = {
    "text": hashes(text),
    "extra_key A": hashes(text, extra_key="A"),
    "extra_key B": hashes(text, extra_key="B"),
    "cache_salt A": hashes(text, cache_salt="A"),
    "cache_salt B": hashes(text, cache_salt="B"),
    "both": hashes(text, extra_key="A", cache_salt="A"),
    "adapter 1": hashes(text, lora_id="1" * 32),
    "adapter 2": hashes(text, lora_id="2" * 32),
    "adapter of a tenant": hashes(text, lora_id="1" * 32, extra_key="A"),
    "image": hashes(image + text),
    "other image": hashes([number + (1 << 50) for number in image] + text),
    "another first token": hashes([99, *text[1:]]),
}
print(json.dumps(found))
"""


def test_no_page_of_one_is_a_page_of_another(sglang: Path) -> None:
    quiet = os.environ | {"PYTHONWARNINGS": "ignore"}
    command = [str(sglang), "-c", _SCRIPT]
    output = subprocess.run(command, env=quiet, check=True, capture_output=True, timeout=300)
    found = json.loads(output.stdout.splitlines()[-1])
    assert len(found) == 12
    pages = [page for hashes in found.values() for page in hashes]
    assert len(pages) == len(set(pages))
    assert all(len(bytes.fromhex(page)) == 32 for page in pages)
