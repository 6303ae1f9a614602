"""The demo pair: two Llama checkpoints of very different size over one tokenizer."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from workshop.demo.tokenizer import END, END_OF_TEXT, PAD, VOCAB_SIZE, save_tokenizer

LONGEST = 2048  # positions
TARGET: dict[str, int] = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
DRAFT: dict[str, int] = {
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def new_model(shape: dict[str, int]) -> Any:
    """Returns an untrained float32 Llama of the given shape."""
    config = LlamaConfig(
        **shape,
        head_dim=32,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=END_OF_TEXT,
        eos_token_id=[END_OF_TEXT, END],
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def save_model(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a standard checkpoint folder with bfloat16 weights; the model itself becomes bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    ends = [END_OF_TEXT, END]
    GenerationConfig(bos_token_id=END_OF_TEXT, eos_token_id=ends, pad_token_id=PAD).save_pretrained(folder)
    save_tokenizer(tokenizer, folder, LONGEST)


def load_model(folder: Path) -> Any:
    """Returns the checkpoint in a folder as a float32 transformers model for inference."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tokenizer of a checkpoint folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
