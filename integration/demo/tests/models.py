# SPDX-License-Identifier: Apache-2.0
"""A model as a user has it in a directory: weights (random ones), a tokenizer, a chat template."""

from __future__ import annotations

from pathlib import Path

from integration.demo.text import load_text
from integration.harness.checkpoint import TINY, write_checkpoint

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_hub_model(root: Path) -> Path:
    """Write it under `root` and return its directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY.vocab,
        special_tokens=["<user>", "<assistant>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([load_text(None).content], trainer)
    folder = write_checkpoint(TINY, root)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    return folder
