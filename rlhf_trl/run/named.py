"""What a word of the command line names: a run, a checkpoint, an adapter, a model; and its run."""

import json
import runpy
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import NamedTuple

from rlhf_trl.data.demonstrations import load_demonstrations
from rlhf_trl.data.files import Examples, FileData
from rlhf_trl.data.pairs import load_preferences
from rlhf_trl.data.prompts import load_prompts
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.side_by_side import Policy
from rlhf_trl.models import EMBEDDED, UNTRAINED, load_policy, load_tokenizer
from rlhf_trl.output import numbered, weights_fault
from rlhf_trl.run.config import Loaded, load_config, read_config
from rlhf_trl.run.folders import home
from rlhf_trl.run.race import recipe_of

# TRL's fields of the recipes whose models answer.
CONFIGS = {
    "grpo": "rlhf_trl.trainers.policy_gradient.PolicyGradientConfig",
    "ppo": "rlhf_trl.trainers.ppo.PPOConfig",
    "dpo": "rlhf_trl.trainers.direct_alignment.PreferenceConfig",
    "kto": "rlhf_trl.trainers.direct_alignment.UnpairedConfig",
    "orpo": "rlhf_trl.trainers.orpo.OddsRatioConfig",
    "sft": "SFTConfig",
}
ADAPTER = "adapter_config.json"
# What says how to train, on how many processes: nothing here, and it might not fit one.
NOT_TRAINED = "--eval_strategy no --load_best_model_at_end false --gradient_accumulation_steps 1"
NO_BATCHES = "--steps_per_generation null --generation_batch_size null"


class Named(NamedTuple):
    """A model: the word for it, the folder or hub name to load, the config of its run if known."""

    word: str
    path: str
    config: Path | None = None


def named(word: str, reward_model: bool = False) -> Named:
    """Return what a word names.

    Args:
        word: a run's folder, a checkpoint or other folder of a model or adapter, a hub name, `tiny`
            or `tiny_untrained`.
        reward_model: whether a reward model is wanted, and no policy.

    Raises:
        InputError: a folder that is missing or holds no (whole) model, a run that has not ended, a
            file, an adapter whose base is gone, or a reward model where none is wanted.
    """
    if word in (EMBEDDED, UNTRAINED):
        return Named(word, word, home() / "configs" / "tiny" / "grpo.yaml")
    folder = Path(word).expanduser()
    if folder.is_file():
        raise InputError(f"{word} is a file; name the folder of a run or of a model.")
    if not folder.is_dir():
        if word.startswith((".", "/", "~")) or word.count("/") != 1 or folder.parent.is_dir():
            raise InputError(
                f"there is no folder {word}; name a run, a checkpoint, another model's folder or "
                f"hub name, or {EMBEDDED} for the embedded model."
            )
        return Named(word, word)
    run = next((at for at in (folder, folder.parent) if (at / "config.yaml").is_file()), None)
    if run == folder:
        folder = run / "model"
        if not folder.is_dir():
            saved = numbered(run, "checkpoint-")
            newest = f"name a checkpoint, such as {saved[max(saved)]}" if saved else "let it end"
            raise InputError(f"{word} is a run that has not ended, so it holds no model; {newest}.")
    files = [name for name in ("config.json", ADAPTER) if (folder / name).is_file()]
    fault = weights_fault(folder) if files else "holds no model" if any(folder.iterdir()) else None
    if fault or not files:
        raise InputError(
            f"{word} {fault or 'is empty'}; name a run, a checkpoint, or the folder of a model."
        )
    told = {key: v for name in files for key, v in json.loads((folder / name).read_text()).items()}
    judges = [*(told.get("architectures") or []), str(told.get("task_type"))]
    if not reward_model and any(k.endswith(("Classification", "_CLS")) for k in judges):
        raise InputError(
            f"{word} is a reward model, which writes no answers; name a policy here and this one "
            "with --reward_model, or compare reward models with rlhf-trl best-of-n."
        )
    base = told.get("base_model_name_or_path", "")
    if ADAPTER in files and Path(base).is_absolute() and not Path(base).is_dir():
        raise InputError(
            f"{word} is an adapter, and its base {base} is gone; put that model there again, or "
            f"write where it is in {folder / ADAPTER}."
        )
    return Named(word, str(folder), run / "config.yaml" if run else None)


def config_of(models: Sequence[Named], config: str | None) -> str:
    """Return the path of a config: the one that is given, or that of the first run.

    Raises:
        InputError: there is neither.
    """
    embedded = (EMBEDDED, UNTRAINED)  # whose config is anyone's
    runs = sorted((m for m in models if m.config), key=lambda m: m.word in embedded)
    found = config or next((str(model.config) for model in runs), None)
    if found is None:
        raise InputError(
            f"{models[0].word} is not of a run here, which would say what to ask and how; name the "
            "config of one with --config."
        )
    return found


def load_run(config: str, words: Sequence[str] = ()) -> tuple[Loaded, Examples]:
    """Return what the config of a policy's run says, and the examples.

    Args:
        config: its path.
        words: options of the recipe, as on its command line.

    Raises:
        InputError: the run is of a reward model; and what the recipe would say.
    """
    given = read_config(config)
    script = recipe_of(given.get("algorithm"))
    recipe = Path(script).stem
    if recipe not in CONFIGS:
        raise InputError(
            f"{config} is of {script}, which trains reward models; name the config of a policy's "
            "run with --config."
        )
    own = runpy.run_path(str(home() / script))["Run"]
    fixed = NOT_TRAINED.split()
    if recipe in ("grpo", "ppo"):
        batch = 2 * given.get("num_generations", 8)
        fixed += [*NO_BATCHES.split(), "--per_device_train_batch_size", str(batch)]
    loaded = load_config(own, CONFIGS[recipe], ["--config", config, *words, *fixed])
    data = loaded.own.dataset
    if not isinstance(data, FileData) or hasattr(loaded.own, "reward_funcs"):
        return loaded, load_prompts(data)
    if recipe == "sft":
        return loaded, load_demonstrations(data, loaded.own.demonstrator)
    return loaded, load_preferences(data, loaded.own.max_samples, recipe == "kto")


def load(model: Named, loaded: Loaded, conversational: bool) -> Policy:
    """Return a named policy as the run of `loaded` would evaluate it.

    Raises:
        InputError: it cannot be loaded.
    """
    args, config = loaded.trl, copy(loaded.model)
    if model.path != config.model_name_or_path:
        config.model_name_or_path, config.model_revision = model.path, "main"
    longest = getattr(args, "max_completion_length", None) or loaded.own.max_completion_length
    try:
        tokenizer = load_tokenizer(config, args, conversational)
        return Policy(model.word, load_policy(config, args), tokenizer, args, longest)
    except InputError as error:
        said = str(error).removeprefix("model_name_or_path: ")
        raise InputError(said) from error
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())[:300]
        raise InputError(f"{model.word} cannot be loaded as a language model ({said}).") from error
