"""Where recipes, configs and the models of runs are."""

import json
from pathlib import Path

from rlhf_trl.errors import InputError
from rlhf_trl.models import ADAPTER
from rlhf_trl.output import numbered


def home() -> Path:
    """Return the folder that holds `recipes/` and `configs/`: a wheel's own, or beside it."""
    package = Path(__file__).parents[1]
    # an editable install maps modules only, so it has no rlhf_trl/recipes on disk
    return package if (package / "recipes").is_dir() else package.parent


def model_folder(field: str, name: str) -> str:
    """Return the folder or hub name of a model that a config's `field` names.

    The folder of a run stands for its `model/`. A folder that does not exist is an error.
    """
    folder = Path(name)
    if folder.is_dir():
        is_model = any((folder / file).is_file() for file in ("config.json", ADAPTER))
        is_run = not is_model and (folder / "model").is_dir()
        return str(folder / "model") if is_run else name
    if _may_be_on_the_hub(name):
        return name
    run = folder.parent if folder.name == "model" else folder
    config = Path("configs", "tiny", f"{run.name}.yaml")
    how = f" ({config})" if (home() / config).is_file() else ""
    raise InputError(f"{field}: there is no folder {name}; train it first{how}, or name another.")


def configs_of(run: Path) -> dict[int, Path]:
    """Return the configs of a run's folder by the step after which it followed each, 0 first."""
    later = numbered(run, "config-from-step-")
    return {0: run / "config.yaml", **dict(sorted(later.items()))}


def last_config(run: Path) -> Path:
    """Return the config that a run followed in the end."""
    return [*configs_of(run).values()][-1]


def _may_be_on_the_hub(name: str) -> bool:
    """Whether a name reads `model` or `owner/model`, and not like a path: no owner is a folder."""
    if name.count("/") > 1 or name[:1] in "./~":
        return False
    return "/" not in name or not Path(name).parent.is_dir()


def with_origin(model: str) -> str:
    """Return the name of a model, and which run of ours left it there, if one did."""
    summary_file = Path(model).parent / "summary.json"
    if Path(model).name != "model" or not summary_file.is_file():
        return model
    summary = json.loads(summary_file.read_text())
    return f"{model} ({summary['name']}, {summary['model_step']} steps, seed {summary['seed']})"
