"""Compare configs/book with a checkout of the book's published code, and print what differs.

    .venv/bin/python scripts/compare_configs.py PATH/TO/rlhf-book [--explain]

Every config of the code is read as `rlhf-trl translate` reads it, and its settings are held against
those of the config here that has its name. A difference has to be explained by a comment in the
config that speaks of the code: at the key, or, where the key is not set, one that names it. The
exit status is 1 if one is not, or if the code has a field or a default that `translate` lacks.

With --explain, the table of `rlhf-trl translate --explain` follows for each config here: every
field of the code with its meaning, what the config here has for it, and how much both train.
"""

import argparse
import ast
import re
import sys
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import yaml

from rlhf_trl.algorithms import formulation
from rlhf_trl.ports.book_code import read_book, translate
from rlhf_trl.ports.book_fields import DEFAULTS
from rlhf_trl.ports.explain import DIFFERS, entries_of_book, table
from rlhf_trl.ports.quantities import quantities
from rlhf_trl.run.config import read_config
from rlhf_trl.run.differences import differences
from rlhf_trl.run.stages import stage_of_config
from rlhf_trl.run.yaml_loader import read_yaml

HERE = Path(__file__).parent.parent / "configs" / "book"
# configs that are called otherwise here
NAMES = {"preference_rm": "reward", "sft_olmo2_1b": "sft", "top_per_prompt": "rejection_sampling"}
# those that are one of ours with another word: the strategies of rejection sampling
SAME = {"random_k_overall", "random_per_prompt", "top_k_overall"}
# where a run writes and reports
NOT_COMPARED = {"output_dir", "run_name", "project", "report_to", "save_strategy", "save_steps"}
NOT_COMPARED |= {"algorithm", "answers", "logging_steps", "dataset.source"}


def flat(block: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Return a mapping with dotted keys; lists stay whole."""
    found = {}
    for key, value in block.items():
        found |= (
            flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
        )
    return found


def of_the_code(path: Path) -> dict[str, Any]:
    """Return what a config of the code sets, with the keys of this project's configs."""
    found = yaml.safe_load(translate(path))
    if found.get("epsilon_high") == found.get("epsilon"):
        found.pop("epsilon_high", None)  # TRL's default
    return flat(found)


def of_ours(path: Path) -> dict[str, Any]:
    """Return what a config here sets."""
    return flat(read_config(path))


def defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Return what a config here has for the keys that it does not set."""
    algorithm = given.get("algorithm")
    # `given` has dotted keys, where stages are known by whole blocks
    config_class = stage_of_config({key.partition(".")[0]: 0 for key in given} | given).part(
        "config"
    )
    from trl import ModelConfig

    found = {}
    for each in (ModelConfig, config_class):
        found |= {f.name: f.default for f in fields(each) if f.default is not MISSING}
    if algorithm is None:
        return found
    row = formulation(algorithm, given["formulation"])
    return found | dict(row.reads) | dict(getattr(row, "trainer_reads", {}))


def comment_on(path: Path, key: str) -> str:
    """Return the comment at a key, in the file that sets it, or one that names the key."""
    name = key.rpartition(".")[2]
    named = ""
    while True:
        lines = path.read_text(encoding="utf-8").splitlines()
        indent = "  " * key.count(".")
        for n, line in enumerate(lines):
            if re.match(rf"{indent}{name}:", line):
                beside, above = line.partition(" # ")[2], lines[n - 1].strip() if n else ""
                found = [beside, above.removeprefix("# "), named]
                return next((text for text in found if re.search(r"\bcode\b", text)), "")
            if re.search(rf"# .*\b{name}\b.*\bcode\b", line):
                named = named or line.partition("# ")[2]
        base = next((x.split()[1] for x in lines if x.startswith("extends:")), None)
        if base is None:
            return named
        path = path.parent / base


def with_reasons(code: Path, ours: Path) -> list[tuple[str, Any, Any, str]]:
    """Return key, our value, the code's value and the comment of all that differs."""
    theirs, mine = of_the_code(code), of_ours(ours)
    usual = defaults(mine)
    if "steps_per_generation" in usual:
        usual["steps_per_generation"] = mine["gradient_accumulation_steps"]  # TRL's default
    known = {key: usual[key] for key in usual.keys() & {*theirs, *mine}}
    found = []
    for key, (one, other) in differences({**known, **mine}, {**known, **theirs}).items():
        # the code evaluates reward models only; panels are of its own prompts
        panel = key.startswith("samples.")
        if key in NOT_COMPARED or panel or ("eval" in key and key not in theirs):
            continue
        found.append((key, one, other, comment_on(ours, key)))
    return found


def explained(code: Path, ours: Path) -> str:
    """Return the table of a config of the code and the one here that has its name."""
    sheet = read_book(code, read_yaml(code))
    differing = with_reasons(code, ours)
    found = []
    for entry in entries_of_book(sheet):
        changed = [line for line in differing if line[0].partition(".")[0] in entry.here]
        if changed:
            here = entry.here | {key: mine for key, mine, _, _ in changed}
            note = "; ".join(why for *_, why in changed)
            entry = replace(entry, here=here, verdict=DIFFERS, note=note)
        found.append(entry)
    mine = read_config(ours)
    own = defaults(of_ours(ours)) | mine
    if own.get("steps_per_generation") is None:  # TRL's default
        own["steps_per_generation"] = own["gradient_accumulation_steps"]
    return table(found, quantities(sheet, own), "the book's code")


def unknown(code: Path, kind: str) -> list[str]:
    """Return what the code's config class has and `translate` does not, or with another default."""
    tree = ast.parse((code / kind / "config.py").read_text())
    blocks = {n.name: n.body for n in tree.body if isinstance(n, ast.ClassDef)}
    found, table = [], DEFAULTS[kind]

    def look(body: list[ast.stmt], before: str = "") -> None:
        for node in body:
            if not isinstance(node, ast.AnnAssign) or node.target.id == "model_config":
                continue
            value, name = node.value, before + node.target.id
            if isinstance(value, ast.Call):  # pydantic's Field(default=...)
                value = next(k.value for k in value.keywords if k.arg == "default")
            if getattr(node.annotation, "id", None) in blocks:
                look(blocks[node.annotation.id], f"{name}.")
            elif name not in table:
                found.append(f"{kind}: translate does not know {name}")
            elif value and ast.literal_eval(value) != table[name]:
                found.append(
                    f"{kind}: {name} is {ast.literal_eval(value)!r} where a config is silent"
                )

    look(blocks["Config"])
    return found


def main() -> None:
    """Print all differences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of natolambert/rlhf-book")
    parser.add_argument("--explain", action="store_true", help="a table of every config as well")
    args = parser.parse_args()
    code = args.checkout / "code"
    if not code.is_dir():
        sys.exit(f"error: {code} is no folder; name a checkout of natolambert/rlhf-book.")
    problems = [line for kind in DEFAULTS for line in unknown(code, kind)]
    compared = {}
    for path in sorted(code.glob("*/configs/*.yaml")):
        ours = HERE / f"{NAMES.get(path.stem, path.stem)}.yaml"
        if path.parent.parent.name in DEFAULTS and ours.exists():
            compared[ours] = path
        elif path.stem in SAME:
            translate(path)
        else:
            print(f"{path.relative_to(code)} has no counterpart in configs/book")
    for ours in sorted(HERE.glob("*.yaml")):
        if ours not in compared:
            print(f"configs/book/{ours.name} has no counterpart in the code")
            continue
        for key, mine, theirs, why in with_reasons(compared[ours], ours):
            line = f"{ours.name}: {key} is {mine!r}, the code's {theirs!r}"
            print(f"{line}: {why}" if why else f"{line}: NOT EXPLAINED")
            problems += [] if why else [line]
        if args.explain:
            print(f"\n{ours.name}\n{explained(compared[ours], ours)}\n")
    if problems:
        sys.exit("error: not explained:\n" + "\n".join(problems))


if __name__ == "__main__":
    main()
