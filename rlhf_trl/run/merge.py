"""What `rlhf-trl merge` does: a LoRA adapter becomes part of its base, checked, written whole."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_trl.errors import InputError
from rlhf_trl.output import replace_folder
from rlhf_trl.run.named import ADAPTER, named

TOLERANCE = 1e-5  # of logits, relative to the largest


def merge(word: str, output: str | None = None) -> tuple[Path, float]:
    """Write, in float32, the model that an adapter and its base make (see `named`).

    Returns:
        The folder (None: `merged`, beside the adapter), and by how much the logits of what it holds
        differ from the unmerged ones.

    Raises:
        InputError: no adapter, a folder that exists, or logits that differ.
    """
    from peft import AutoPeftModelForCausalLM

    source = Path(named(word).path)
    folder, gap = Path(output or source.parent / "merged"), 0.0
    if not (source / ADAPTER).is_file():
        raise InputError(f"{word} is no adapter but a whole model; there is nothing to merge.")
    if folder.exists():
        raise InputError(f"--output: {folder} exists; name a new folder.")
    try:
        model = AutoPeftModelForCausalLM.from_pretrained(source, dtype="float32").eval()
    except (OSError, ValueError) as error:
        raise InputError(f"{word} cannot be loaded: {' '.join(str(error).split())}") from error
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.get_input_embeddings().num_embeddings, (8, 32), generator=generator)

    @torch.no_grad()
    def write(part: str) -> None:
        nonlocal gap
        apart = model(input_ids=ids).logits
        model.merge_and_unload(safe_merge=True).save_pretrained(part)
        AutoTokenizer.from_pretrained(source).save_pretrained(part)
        merged = AutoModelForCausalLM.from_pretrained(part, dtype="float32").eval()
        gap = float((merged(input_ids=ids).logits - apart).abs().max() / apart.abs().max())
        if not gap <= TOLERANCE:
            raise InputError(
                f"{word}: merged, its logits differ by {gap:.1e} of the largest, more than "
                f"{TOLERANCE:g}, so nothing is written; use the adapter as it is."
            )

    replace_folder(folder, write, main_process=True, wait=lambda: None)
    return folder, gap
