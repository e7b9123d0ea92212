"""The configs that ship with the package, by name: `tiny/grpo` is configs/tiny/grpo.yaml."""

from pathlib import Path

from rlhf_trl.errors import InputError, nearest
from rlhf_trl.run.folders import home

FOLDERS = ("own", "tiny", "book", "scale", "pipeline", "accelerate")
"""The folders of configs/, in the order in which a user needs them."""


def names() -> list[str]:
    """Return the names of all configs that ship, folder by folder."""
    configs = home() / "configs"
    paths = [path for folder in FOLDERS for path in sorted((configs / folder).glob("*.yaml"))]
    return [path.relative_to(configs).with_suffix("").as_posix() for path in paths]


def config_file(name: str | Path) -> Path:
    """Return the path of a config: of the file, else of the shipped one, that has this name.

    A shipped one may be written as in the project's folder, too (`configs/tiny/grpo.yaml`). Where
    there is neither, the name is returned as it is, for the caller to refuse.
    """
    path = Path(name)
    short = str(name).removeprefix("configs/").removesuffix(".yaml")
    if path.is_file() or short not in names():
        return path
    return home() / "configs" / f"{short}.yaml"


def existing_config(name: str | Path, where: str) -> Path:
    """Return the path of a config as `config_file` does; refuse a name that none has.

    `where` says which option or command the name was written for.
    """
    path = config_file(name)
    if not path.is_file():
        raise InputError(
            f"{where}: {name} is neither a file nor a config that ships"
            f"{nearest(str(name), names())}; `rlhf-trl configs` lists those."
        )
    return path


def shipped_file(name: str) -> Path | None:
    """Return a file that ships and that a config names from the project's folder, if it is one.

    None: there is no such file, or the folder that a command is started from has one of the name.
    """
    path = home() / name
    is_below_configs = Path(name).parts[:1] == ("configs",)
    return path if is_below_configs and path.is_file() and not Path(name).is_file() else None
