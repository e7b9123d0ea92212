"""What `rlhf-trl quantize` does: a model in 8 or 4 bits, reloaded, measured, and written whole."""

import json
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import cached_file

from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.tables import Line, text
from rlhf_trl.models import ADAPTER, EMBEDDED, UNTRAINED, Quantization
from rlhf_trl.output import replace_folder, write_json
from rlhf_trl.quantized import check_method, library_of, quantized_options
from rlhf_trl.run.merge import TOLERANCE, largest_gap, some_logits
from rlhf_trl.run.named import Named, loading, named
from rlhf_trl.run.quantize_measures import Numbers, Policies, RewardModels
from rlhf_trl.run.versions import versions
from rlhf_trl.tiny import checkpoint_path

FILE = "quantized.json"  # beside the weights: of what they were made, and how much that changed


def quantize(
    word: str,
    method: Quantization,
    output: str | None = None,
    config: str | None = None,
    words: Sequence[str] = (),
) -> tuple[Path, str]:
    """Write a named model in fewer bits; an adapter is merged first.

    The model is measured as it is read again from the disk. Where it then computes other logits
    than before it was saved, nothing is written.

    Args:
        word: what to quantize.
        method: how.
        output: a new folder; None: beside the model, or in outputs/ for a hub name.
        config: of the run on whose held-out prompts or answers it is measured; None: its own.
        words: options of that config, as on a recipe's command line.

    Returns:
        The folder, and a table of what has changed.
    """
    check_method(method, "--to")
    model = named(word, reward_model=True)
    if word == UNTRAINED:
        raise InputError(f"{word} is made in memory; name a model that was saved.")
    source = checkpoint_path() if word == EMBEDDED else model.path
    folder = Path(output) if output else _beside(source, word, method)
    if folder.exists():
        raise InputError(f"--output: {folder} exists; name a new folder.")
    kind = RewardModels if _is_reward_model(source) else Policies
    models = kind(Named(word, source, model.config), config, words)  # reads what they measure on
    with TemporaryDirectory() as temporary:
        if Path(source, ADAPTER).is_file():
            models.merge(temporary + "/merged")
            source = temporary + "/merged"
        table: list[Line] = []

        def write(part: str) -> None:
            """Quantize, save, reload and measure; leave nothing where one of these fails."""
            try:
                numbers = _quantize(models, source, method, part)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
            library = library_of(method)
            facts = {
                "made_from": word,
                "to": method,
                "versions": {**versions(), library: version(library)},
                "measured_on": models.measured_on,
                "numbers": numbers,
            }
            write_json(Path(part, FILE), facts)
            table.extend(_lines(numbers, method))

        replace_folder(folder, write, main_process=True, wait=lambda: None)
    return folder, f"{models.measured_on}\n\n{text(table)}"


@torch.no_grad()
def _quantize(
    models: Policies | RewardModels, source: str, method: Quantization, part: str
) -> Numbers:
    """Quantize a whole model into the folder `part`; return what the reloaded one computes."""
    options = quantized_options(method, source, "--to", models.device)
    started = perf_counter()
    with loading(models.word):
        quantized = models.load_plain(source, options).eval()
    seconds = perf_counter() - started
    # before any forward: on some CPUs that repacks 4-bit weights, and rounds what is saved then
    quantized.save_pretrained(part)
    AutoTokenizer.from_pretrained(source).save_pretrained(part)
    if models.reader:  # how a reward model reads texts
        models.reader.save(part)
    before = some_logits(quantized)
    del quantized
    reloaded = models.load(part)
    gap = largest_gap(some_logits(reloaded.model), before)
    if not gap <= TOLERANCE:  # also true of NaN
        raise InputError(
            f"{models.word}: saved and reloaded, its logits differ by {gap:.1e} of the largest, so "
            f"nothing is written; write another --to than {method}."
        )
    numbers = models.compare(models.load(source), reloaded)
    numbers["reload gap"] = {"quantized": gap}
    numbers["MB on disk"] = {"whole": _megabytes(source), "quantized": _megabytes(part)}
    numbers["seconds to quantize"] = {"quantized": seconds}
    return numbers


def _beside(source: str, word: str, method: str) -> Path:
    """Return where a quantized model goes by default."""
    path = Path(source)
    if word == EMBEDDED or not path.is_dir():
        return Path("outputs", f"{Path(word).name}-{method}")
    return path.parent / f"{path.name}-{method}"


def _is_reward_model(source: str) -> bool:
    """Tell by its config whether a model, or what an adapter changes, is a classifier."""
    adapter = Path(source, ADAPTER)
    if adapter.is_file():
        return str(json.loads(adapter.read_text()).get("task_type")).endswith("_CLS")
    with loading(source):
        names = AutoConfig.from_pretrained(source).architectures or []
    return any(name.endswith("Classification") for name in names)


def _megabytes(source: str) -> float:
    """Return the size of the files of weights."""
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(cached_file(source, "config.json")).parent
    weights = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    return sum(file.stat().st_size for file in weights) / 1e6


def _lines(numbers: Numbers, method: str) -> list[Line]:
    """Return the lines of the table."""
    lines = []
    for name, values in numbers.items():
        whole = f"{values['whole']:.4g}" if "whole" in values else "-"
        quantized = f"{values['quantized']:.4g}"
        if "error" in values:
            quantized += f" ± {values['error']:.2g}"
        lines.append({"": name, "whole": whole, method: quantized})
    return lines
