"""When a trainer's prompts are read once for all their completions; `decode` does it."""

from functools import partial
from itertools import groupby

import torch
from transformers.integrations import is_deepspeed_zero3_enabled
from typing_extensions import override


class ReadsPromptsOnce:
    """Trainer mixin: without vLLM, `read_prompts_once` lets `decode` generate where it can.

    "exact" does so on a CPU in float32, where every token is that of `generate`; "always" on any
    device and in any precision, where rounding depends on how many sequences are read at once.
    """

    def _reads_prompts_once(self) -> bool:
        wanted, args = getattr(self.args, "read_prompts_once", None), self.args
        if self._stock or wanted is None or args.use_vllm or args.torch_compile:
            return False
        if self.is_fsdp_enabled or is_deepspeed_zero3_enabled():  # whose processes wait for all
            return False
        is_exact = args.device.type == "cpu" and self.model.dtype == torch.float32 and not args.bf16
        return wanted == "always" or is_exact

    # Extends _generate_single_turn of TRL's trainers, which calls the model's `generate`.
    @override
    def _generate_single_turn(self, *args, **kwargs):
        model = self.accelerator.unwrap_model(self.model)
        if "generate" in vars(model) or not self._reads_prompts_once():  # a method of the user's
            return super()._generate_single_turn(*args, **kwargs)
        from rlhf_trl.rollouts.decode import decode_or_generate

        model.generate = partial(decode_or_generate, model, model.generate)
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            del model.generate

    # Extends _tokenize_prompts of TRL's trainers: equal neighbors are tokenized once.
    @override
    def _tokenize_prompts(self, prompts):
        has_images_or_tools = self._is_vlm or getattr(self, "environment_factories", None)
        if not self._reads_prompts_once() or has_images_or_tools:
            return super()._tokenize_prompts(prompts)
        groups = [(prompt, len([*equal])) for prompt, equal in groupby(prompts)]
        ids, images, fields = super()._tokenize_prompts([prompt for prompt, _ in groups])
        pairs = zip(ids, groups, strict=True)
        repeated = [[*own] for own, (_, count) in pairs for _ in range(count)]
        return repeated, images, fields
