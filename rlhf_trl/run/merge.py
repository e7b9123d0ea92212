"""What `rlhf-trl merge` does: a LoRA adapter becomes part of its base, checked, written whole."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from rlhf_trl.errors import InputError
from rlhf_trl.output import replace_folder
from rlhf_trl.policies import load_language_model
from rlhf_trl.run.named import ADAPTER, loading, named

TOLERANCE = 1e-5  # of logits, relative to the largest


@torch.no_grad()
def merge(word: str, output: str | None = None) -> tuple[Path, float]:
    """Write, in float32, the model that a named adapter and its base make.

    Returns:
        The folder (`merged`, beside the adapter, unless `output` names another), and by how much
        the logits of the model differ from the unmerged ones.
    """
    source = Path(named(word).path)
    folder = Path(output or source.parent / "merged")
    if not (source / ADAPTER).is_file():
        raise InputError(f"{word} is a whole model, not an adapter; there is nothing to merge.")
    if folder.exists():
        raise InputError(f"--output: {folder} exists; name a new folder.")
    with loading(word):
        model = load_language_model(str(source), dtype="float32").eval()
    logits_before = some_logits(model)
    # an adapter of the embeddings on one side must not change those of the other side
    was_tied = _untie(model.get_base_model())
    merged = model.merge_and_unload(safe_merge=True)  # refuses weights that are no numbers
    if was_tied:
        _tie_if_equal(merged)
    gap = largest_gap(some_logits(merged), logits_before)
    if not gap <= TOLERANCE:  # also true of NaN
        raise InputError(
            f"{word}: merged, its logits differ by {gap:.1e} of the largest, more than "
            f"{TOLERANCE:g}, so nothing is written; use the adapter as it is."
        )

    def write(part: str) -> None:
        merged.save_pretrained(part)
        AutoTokenizer.from_pretrained(source).save_pretrained(part)

    # one process, which has no others to wait for
    replace_folder(folder, write, main_process=True, wait=lambda: None)
    return folder, gap


def some_logits(model: Any) -> torch.Tensor:
    """Return the logits of eight random texts, the same for all models with such a vocabulary.

    They are read one by one, since not every model has a padding token.
    """
    torch.manual_seed(0)
    ids = torch.randint(len(model.get_input_embeddings().weight), (8, 32))
    logits = [model(input_ids=row.to(model.device).unsqueeze(0)).logits for row in ids]
    return torch.cat(logits).float().cpu()


def largest_gap(after: torch.Tensor, before: torch.Tensor) -> float:
    """Return by how much logits differ at most, relative to the largest of before."""
    return float((after - before).abs().max() / before.abs().max())


def _untie(model: Any) -> bool:
    """Let output embeddings share no weights with the input ones; return whether they did.

    An adapter of one side, merged, would otherwise change the other side, too.
    """
    head = model.get_output_embeddings()
    shared = {id(weight) for weight in model.get_input_embeddings().parameters()}
    tied = False
    # where an adapter changes the head, PEFT has wrapped it, and the weight is in a module within
    for module in head.modules() if head is not None else ():
        for name, weight in list(module.named_parameters(recurse=False)):
            if id(weight) in shared:
                setattr(module, name, nn.Parameter(weight.detach().clone(), requires_grad=False))
                tied = True
    if tied:
        model.config.tie_word_embeddings = False
    return tied


def _tie_if_equal(model: Any) -> None:
    """Let embeddings share their weights again, unless an adapter has made them differ."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    model.config.tie_word_embeddings = torch.equal(inputs.weight, outputs.weight)
    if model.config.tie_word_embeddings:
        outputs.weight = inputs.weight
