"""The rooms of the package, and the one direction in which they import each other."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
# from the ground; a room imports those before it
ROOMS = [
    *["errors", "book", "algorithms", "losses", "tiny", "output", "manifests", "cards"],
    "named_templates",
    *["models", "value_models", "policies", "quantized"],
    *["on_deepspeed", "synced_reference", "checkpoints"],
    *["data", "rollouts", "reward_models", "rewards", "evaluation", "trainers", "run", "ports"],
    *["pipeline", "compare", "cli"],
]


def imported(path):
    """Return the rooms that a file imports, inside functions, too, and by name (`load_config`)."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and str(node.value).startswith("rlhf_trl."):
            names.add(node.value)
    return {name.split(".")[1] for name in names if name.startswith("rlhf_trl.")}


def test_every_room_imports_only_those_below_it():
    files = [path for path in (ROOT / "rlhf_trl").rglob("*.py") if path.stem != "__init__"]
    files += [path for path in (ROOT / "rlhf_trl").glob("*/__init__.py")]
    upwards, seen = set(), set()
    for path in files:
        room = path.relative_to(ROOT / "rlhf_trl").with_suffix("").parts[0]
        seen.add(room)
        below = {*ROOMS[: ROOMS.index(room) + 1]}
        upwards |= {(str(path.relative_to(ROOT)), other) for other in imported(path) - below}
    assert not upwards
    assert seen == {*ROOMS}


def test_nothing_but_the_command_imports_the_comparison():
    files = [path for folder in ("rlhf_trl", "recipes") for path in (ROOT / folder).rglob("*.py")]
    outside = [path for path in files if ROOT / "rlhf_trl" / "compare" not in path.parents]
    importing = [str(path.relative_to(ROOT)) for path in outside if "compare" in imported(path)]
    assert importing == ["rlhf_trl/cli.py"]


def test_what_measures_knows_neither_drift_nor_pages():
    below = ["measure", "models", "trainers", "windows", "identities", "rows", "matrix"]
    order = [
        *below,
        "as_stock",
        "drift",
        "subjects",
        "closest",
        "pages",
        "supervised",
        "two_configs",
    ]
    order += ["probe", "launch", "command"]
    package = ROOT / "rlhf_trl" / "compare"
    seen = set()
    for path in package.rglob("*.py"):
        part = path.relative_to(package).with_suffix("").parts[0]
        if part == "__init__":
            continue
        seen.add(part)
        names = [name.split(".") for name in modules_imported(path)]
        parts = {name[2] for name in names if name[:2] == ["rlhf_trl", "compare"] and name[2:]}
        assert parts <= {*order[: order.index(part) + 1]}, path
    assert seen == {*order}


def test_recipes_import_run_and_trainers():
    recipes = sorted((ROOT / "recipes").glob("*.py"))
    assert len(recipes) >= 9
    for path in recipes:
        assert imported(path) <= {"run", "trainers"}, path


def test_no_modules_import_each_other():
    """Inside a room, too, and in functions; `TYPE_CHECKING` is nothing that runs."""
    package = ROOT / "rlhf_trl"
    files = [path for path in package.rglob("*.py") if path.stem != "__init__"]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    imports = {name: modules_imported(path) & names.keys() for name, path in names.items()}
    while leaves := [name for name, others in imports.items() if not others]:
        for name in leaves:
            del imports[name]
        for others in imports.values():
            others.difference_update(leaves)
    assert not imports  # what is left imports itself by way of others


def modules_imported(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names
