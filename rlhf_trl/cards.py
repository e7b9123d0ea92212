"""What a model card says beside what TRL writes: the paper, the loss, folders that are models."""

import re
from pathlib import Path

from rlhf_trl import algorithms, output


def paper(algorithm: str) -> dict[str, str | None]:
    """Return title, arXiv number and BibTeX of a row's paper; without one, what the row says."""
    where = algorithms.ALGORITHMS[algorithm].paper
    number = re.split("[: ]", where)[-1]  # of "arXiv:NUMBER"
    entries = Path(__file__).parent.joinpath("papers.bib").read_text("utf-8").split("\n\n")
    entry = next((entry.strip() for entry in entries if number in entry), where)
    title = re.search(r"title *= *{{(.*)}}", entry)
    return {
        "title": title[1] if title else where,
        "id": number if "arXiv" in where else None,
        "citation": entry,
    }


def complete(folder: Path, base: str | None, loss: str | None) -> None:
    """Complete TRL's card in a run's folder, which has None for a model that is a folder.

    Args:
        folder: of the run.
        base: what was trained; None: it is not known.
        loss: the row, as "gspo (chapter)"; None: none.
    """
    path = folder / "README.md"
    text = path.read_text("utf-8")
    if loss is not None:
        heading = "\n### Framework versions\n"
        text = text.replace(heading, f"\nIts loss is `{loss}` of rlhf_trl.\n{heading}")
    if base is not None:
        text = text.replace("[None](https://huggingface.co/None)", f"`{base}`")
        text = text.replace('model="None"', f'model="{folder / "model"}"')
    output.write_whole(path, text)
