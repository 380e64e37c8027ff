# SPDX-License-Identifier: Apache-2.0
"""SGLang's own resolution of its command line, with FlexKV's plugin. Each model is a configuration
without weights, so nothing can have read any."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from flexkv import FlexKVError

SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-5,
}
WINDOWS = {
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
LAGUNA = {"model_type": "llama", "architectures": ["LagunaForCausalLM"], **WINDOWS}
GEMMA = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], **WINDOWS}
QWEN_NEXT = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
QWEN_VL: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "vision_config": {},
}

ON_CPU = [
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--skip-tokenizer-init",
]
FLAG = ["--enable-flexkv"]
OWN_FLAGS = [
    "--enable-unified-cache-external-linker",
    "--unified-cache-external-linker-backend=dynamic",
    "--unified-cache-external-linker-config="
    '{"linker":"FlexKVLinker","linker_module_path":"flexkv_sglang.linker"}',
]
NO_BUFFER = "--mamba-radix-cache-strategy=no_buffer --disable-overlap-schedule"
DECODE = "--disaggregation-mode=decode"
RADIX = f"{DECODE} --disaggregation-decode-enable-radix-cache"
DRAFT = (
    "--speculative-draft-model-path={model} --speculative-num-steps=3 --speculative-eagle-topk=1 "
    "--speculative-num-draft-tokens=4"
)

REFUSED = [
    (
        LAGUNA,
        f"--speculative-algorithm=EAGLE {DRAFT}",
        "is EAGLE and the model .* has sliding windows .* --disable-hybrid-swa-memory of SGLang$",
    ),
    (
        QWEN_NEXT,
        f"{NO_BUFFER} --speculative-algorithm=EAGLE {DRAFT}",
        "is EAGLE and the model .* has sliding windows or recurrent states; .*",
    ),
    *(
        (QWEN_NEXT, f"{NO_BUFFER} {flag}", f"{flag} is set; .* as the model computes on them$")
        for flag in (
            "--enable-int8-mamba-checkpoint",
            "--enable-linear-replayssm",
            "--enable-linear-replayssm-spec",
        )
    ),
    (QWEN_VL, "--model-impl=transformers", "--model-impl is transformers"),
    (
        LLAMA,
        "--pp-size=2 --disaggregation-mode=prefill",
        "--pp-size .* is 2 with --disaggregation-mode prefill; allowed .* 1, or",
    ),
    (LAGUNA, "--pp-size=2", "--pp-size .* is 2 and the model .* has sliding windows"),
    (QWEN_NEXT, f"{NO_BUFFER} --pp-size=2", "--pp-size .* is 2 and .* or recurrent states"),
    (LLAMA, "--nnodes=2 --dist-init-addr=127.0.0.1:5000", "--nnodes is 2"),
    (LLAMA, "--enable-hierarchical-cache", "--enable-hierarchical-cache .* is set"),
    (LLAMA, "--enable-lmcache", "--enable-lmcache is set"),
    (LLAMA, "--hicache-storage-backend=file", "--hicache-storage-backend is 'file'"),
    (LLAMA, "--disable-radix-cache", "by --disable-radix-cache"),
    (LLAMA, "--enable-hisparse", "--enable-hisparse is set"),
    (LLAMA, "--enable-unified-memory", "--enable-unified-memory is set"),
    (LLAMA, "--enable-kv-cache-sharding", "--enable-kv-cache-sharding is set"),
    (LLAMA, "--enable-return-routed-experts", "routed-experts is set; .* pages that are loaded$"),
    (LLAMA, "--enable-return-indexer-topk", "--enable-return-indexer-topk is set"),
    (LLAMA, "--kv-cache-dtype=mxfp8", "--kv-cache-dtype is mxfp8"),
    (LLAMA, "--dllm-algorithm=LowConfidence", "--dllm-algorithm is 'LowConfidence'"),
    (LLAMA, DECODE, "also --disaggregation-decode-enable-radix-cache"),
    (
        LLAMA,
        f"{RADIX} --disaggregation-decode-host-receive-threshold=0.5",
        "--disaggregation-decode-host-receive-threshold is 0.5",
    ),
    (
        LLAMA,
        f"{RADIX} --disaggregation-decode-retraction-backup=host_pool",
        "--disaggregation-decode-retraction-backup is host_pool",
    ),
    (
        LLAMA,
        f"{RADIX} --disaggregation-decode-enable-offload-kvcache",
        "--disaggregation-decode-enable-offload-kvcache is set",
    ),
    (LLAMA, "--disaggregation-mode=prefill --enable-pd-role-switch", "--enable-pd-role-switch is"),
]

STARTS = [
    (LLAMA, ""),
    (LLAMA, "--pp-size=2"),
    (LLAMA, "--speculative-algorithm=NGRAM --speculative-num-draft-tokens=4"),
    (LLAMA, f"--speculative-algorithm=EAGLE {DRAFT}"),
    (LLAMA, f"--speculative-algorithm=NEXTN {DRAFT}"),
    (LLAMA, f"--speculative-algorithm=STANDALONE {DRAFT}"),
    (LLAMA, "--model-impl=transformers"),
    (LLAMA, "--disaggregation-mode=prefill"),
    (LLAMA, RADIX),
    (LLAMA, "--dp-size=2"),
    (LLAMA, "--tp-size=2 --dp-size=2 --enable-dp-attention"),
    (LAGUNA, ""),
    (LAGUNA, "--disable-hybrid-swa-memory"),
    (GEMMA, ""),
    (QWEN_NEXT, NO_BUFFER),
    (QWEN_NEXT, f"{NO_BUFFER} --disaggregation-mode=prefill"),
]


def resolve(folder: Path, model: dict[str, Any], flags: str, flexkv: list[str]) -> None:
    """Resolve a command line, as SGLang does before it starts any process."""
    load_plugins()
    path = model_folder(folder, model)
    args = flags.replace("{model}", str(path)).split()
    prepare_server_args([f"--model-path={path}", *ON_CPU, *flexkv, *args]).resolve_once()


def model_folder(folder: Path, model: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(SHAPE | model))
    return folder


@pytest.mark.parametrize("flexkv", [FLAG, OWN_FLAGS], ids=["flag", "own flags"])
@pytest.mark.parametrize(("model", "flags", "said"), REFUSED, ids=[each[2] for each in REFUSED])
def test_a_server_that_flexkv_cannot_serve_is_refused_before_it_reads_weights(
    tmp_path: Path, model: dict[str, Any], flags: str, said: str, flexkv: list[str]
) -> None:
    with pytest.raises(FlexKVError) as caught:
        resolve(tmp_path, model, flags, flexkv)
    assert re.search(said, str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("flexkv", [FLAG, OWN_FLAGS], ids=["flag", "own flags"])
@pytest.mark.parametrize(("model", "flags"), STARTS, ids=[str(each) for each in range(len(STARTS))])
def test_other_servers_go_on_to_their_weights(
    tmp_path: Path, model: dict[str, Any], flags: str, flexkv: list[str]
) -> None:
    resolve(tmp_path, model, flags, flexkv)


def test_servers_without_flexkv_are_not_checked(tmp_path: Path) -> None:
    resolve(tmp_path, LAGUNA, "", [])
    resolve(tmp_path, LLAMA, "--disable-radix-cache", [])


def test_the_command_says_what_is_refused_and_not_that_weights_are_missing(tmp_path: Path) -> None:
    path = model_folder(tmp_path, QWEN_NEXT)
    command = [sys.executable, "-m", "sglang.launch_server", f"--model-path={path}"]
    done = subprocess.run(
        [*command, *ON_CPU, *FLAG, *NO_BUFFER.split(), "--enable-int8-mamba-checkpoint"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "--enable-int8-mamba-checkpoint is set; allowed with FlexKV: states as the" in last
