"""What a word of the command line names: a run, a checkpoint, an adapter, a model; and its run."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_trl.data.examples import Examples
from rlhf_trl.errors import InputError, reason_in_short
from rlhf_trl.evaluation.side_by_side import Policy
from rlhf_trl.manifests import weights_fault
from rlhf_trl.models import ADAPTER, EMBEDDED, UNTRAINED
from rlhf_trl.output import numbered
from rlhf_trl.run.config import Loaded
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.folders import home, last_config
from rlhf_trl.run.options import join_options
from rlhf_trl.run.stages import stage_of_config

# Nothing is trained here: these options replace what a config says of it, since settings for
# several processes might be refused on one.
NOT_TRAINED = "--eval_strategy no --load_best_model_at_end false --gradient_accumulation_steps 1"
NO_BATCHES = "--steps_per_generation null --generation_batch_size null"


class Named(NamedTuple):
    """A model: the word for it, the folder or hub name to load, the config of its run if known."""

    word: str
    path: str
    config: str | None = None

    @property
    def name(self) -> str:
        """Return what to call it in a table: its folder, or the one around `seed-N` or `model`."""
        folders = Path(self.word).parts
        own = [name for name in folders if name != "model" and not re.fullmatch(r"seed-\d+", name)]
        return (own or folders)[-1]

    def load(self, loaded: Loaded, conversational: bool) -> Policy:
        """Return it as the policy that a run with the config `loaded` would evaluate."""
        config = copy(loaded.model)
        if self.path != config.model_name_or_path:
            config.model_name_or_path, config.model_revision = self.path, "main"
        with loading(self.word):
            return Policy(self.word, config, loaded.trl, conversational)


@contextmanager
def loading(word: str) -> Iterator[None]:
    """Say in one sentence why what is named cannot be loaded."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).removeprefix("model_name_or_path: ")) from error
    except (OSError, ValueError) as error:
        reason = reason_in_short(error)
        raise InputError(f"{word} cannot be loaded as a language model: {reason}") from error


def with_checkpoints(words: Sequence[str]) -> list[str]:
    """Return words with the checkpoints that a pattern names, by step (`RUN/checkpoint-*`).

    A shell would sort them by their names, checkpoint-100 before checkpoint-20. It leaves a pattern
    to us where that is quoted, or where nothing fits.
    """
    expanded = []
    for word in words:
        pattern = Path(word).expanduser()
        if "*" not in pattern.name or pattern.exists():
            expanded.append(word)
            continue
        steps = numbered(pattern.parent, "checkpoint-")
        fitting = [str(path) for _, path in sorted(steps.items()) if path.match(pattern.name)]
        if not fitting:
            raise InputError(f"no checkpoint fits {word}; name a run's, as in RUN/checkpoint-*.")
        expanded += fitting
    return expanded


def named(word: str, reward_model: bool = False) -> Named:
    """Return the model that a word names.

    Args:
        word: the folder of a run, checkpoint, model or adapter; a hub name OWNER/NAME; or the word
            for the embedded model, or for one that is not trained.
        reward_model: whether a reward model is accepted, too.

    Raises:
        InputError: the word names nothing, the folder holds no whole model, or it holds a reward
            model, which is not accepted.
    """
    if word in (EMBEDDED, UNTRAINED):
        return Named(word, word)
    folder = Path(word).expanduser()
    if folder.is_file():
        raise InputError(f"{word} is a file; name the folder of a run or of a model.")
    if not folder.is_dir():
        # OWNER/NAME, but if there is a folder OWNER, the word is a misspelled path
        is_hub_name = word.count("/") == 1 and word[0] not in "./~" and not folder.parent.is_dir()
        if is_hub_name:
            return Named(word, word)
        raise InputError(
            f"there is no folder {word}; name a run, a checkpoint, another model's folder or hub "
            f"name, or {EMBEDDED} for the embedded model."
        )
    model, run = _model_and_run(word, folder)
    model_config = _model_config(word, model)
    # a whole model names its architecture, an adapter PEFT's task type, such as SEQ_CLS
    classes = [*(model_config.get("architectures") or []), str(model_config.get("task_type"))]
    if not reward_model and any(name.endswith(("Classification", "_CLS")) for name in classes):
        raise InputError(
            f"{word} is a reward model, which writes no answers; name a policy here and this with "
            "--reward_model, or compare reward models with rlhf-trl best-of-n."
        )
    base = Path(model_config.get("base_model_name_or_path") or "")
    if base.is_absolute() and not base.is_dir():  # other bases may be names on the hub
        raise InputError(
            f"{word} is an adapter whose base model {base} is gone; put it back, or write its new "
            f"path as base_model_name_or_path into {model / ADAPTER}."
        )
    return Named(word, str(model), str(last_config(run)) if run else None)


def _model_and_run(word: str, folder: Path) -> tuple[Path, Path | None]:
    """Return the folder of the model that a folder is or holds, and that of its run, if any."""
    if (folder / "config.yaml").is_file():
        model = folder / "model"
        if not model.is_dir():
            saved = numbered(folder, "checkpoint-")
            remedy = f"name {saved[max(saved)]}, its newest checkpoint" if saved else "let it end"
            raise InputError(f"{word} is a run that has not ended, so it holds no model; {remedy}.")
        return model, folder
    if (folder.parent / "config.yaml").is_file():  # a checkpoint, or the `model` of a run
        return folder, folder.parent
    return folder, None


def _model_config(word: str, model: Path) -> dict[str, Any]:
    """Return what the config files of a whole model say; those of an adapter overrule it."""
    config_files = [model / "config.json", model / ADAPTER]
    config_files = [file for file in config_files if file.is_file()]
    fault = weights_fault(model) if config_files else "holds no model"
    if fault:
        fault = fault if any(model.iterdir()) else "is empty"
        raise InputError(f"{word} {fault}; name a run, a checkpoint or a folder with a model.")
    config: dict[str, Any] = {}
    for file in config_files:
        config |= json.loads(file.read_text())
    return config


def config_of(models: Sequence[Named], config: str | None) -> str | None:
    """Return the path of the given config, of the first run's, or of the embedded model's."""
    candidates = [config, *(model.config for model in models)]
    if any(model.word in (EMBEDDED, UNTRAINED) for model in models):
        candidates.append(str(home() / "configs" / "tiny" / "grpo.yaml"))
    return next(filter(None, candidates), None)


def load_run(config: str, words: Sequence[str] = ()) -> tuple[Loaded, Examples]:
    """Return what a config of a policy's run says, with options of its recipe, and its examples."""
    values = read_config(config)
    stage = stage_of_config(values, config)
    if stage.examples is None:
        raise InputError(
            f"{config} is for {stage.script}, which trains reward models; name a policy's with "
            "--config."
        )
    fixed_options = NOT_TRAINED.split()
    if stage.prompted:  # TRL refuses a batch that the number of generations does not divide
        batch = 2 * values.get("num_generations", 8)
        fixed_options += [*NO_BATCHES.split(), "--per_device_train_batch_size", str(batch)]
    loaded = stage.load(join_options(words, ["--config", config, *fixed_options]))
    if not hasattr(loaded.trl, "max_completion_length"):  # SFTConfig has none, its recipe does
        loaded.trl.max_completion_length = loaded.own.max_completion_length
    return loaded, stage.part("examples")(loaded.own)
