"""Where recipes and configs are: inside an installed wheel, or beside the package's folder."""

from pathlib import Path


def home() -> Path:
    """Return the folder that holds `recipes/` and `configs/`."""
    package = Path(__file__).parents[1]
    # an editable install maps modules only, so it has no rlhf_trl/recipes on disk
    return package if (package / "recipes").is_dir() else package.parent
