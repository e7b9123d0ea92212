"""The embedded model: a Qwen3 small enough to train on a laptop CPU."""

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

PAD, BOS, END = 0, 1, 5  # the tokenizer's ids; a test holds the two together
VOCABULARY = 120  # 113 tokens, rounded up to a multiple of 8


def build_model(seed: int = 0) -> Qwen3ForCausalLM:
    """Return a freshly initialized Qwen3 with 251,712 float32 parameters.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Seed of the initial weights. The caller's random state is neither used nor moved.
    """
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        intermediate_size=288,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=END,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=END)
    return model
