"""What the scripts of this folder train: a tiny Llama with random weights, on made-up sequences."""

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM


def build() -> LlamaForCausalLM:
    """The same on every rank; its output layer is its embedding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Counting(Dataset):
    """Sequences that count by 1, 2 or 3."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + (1 + index % 3) * torch.arange(12)) % 32
        return {"input_ids": tokens, "labels": tokens}
