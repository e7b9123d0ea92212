"""ANALYSIS.md: what the files of a pipeline say of its models and their training, in words.

No number and no verdict here is written by hand: with other numbers, the sentences say otherwise.
"""

from collections.abc import Mapping, Sequence

from rlhf_trl.evaluation.tables import markdown
from rlhf_trl.pipeline.failures import Part, failures
from rlhf_trl.pipeline.frontier import CLEAR, over_optimization, penalty_against_stopping
from rlhf_trl.pipeline.results import Results, summary
from rlhf_trl.pipeline.training import training


def chapters(results: Results) -> dict[str, list[Part]]:
    """Return the parts of the analysis that the page shows, too, by the heading above them."""
    return {"Failures": failures(results), "Training": training(results)}


def as_markdown(results: Results, parts_by_chapter: Mapping[str, Sequence[Part]]) -> str:
    """Return the analysis as Markdown: what is known of the models, then what `chapters` returns.

    The figure of all curves ends the last chapter, on training.
    """
    first = results.ends(results.reference)[0]
    intro = (
        f"Made from the files of this folder: {len(results.seeds)} seeds, {len(first.questions)} "
        f"held-out questions, {len(first.samples[0])} sampled answers to each; the reference is "
        f"{results.title(results.reference)}. "
        f"{f'Gold is {results.gold}.' if results.gold else 'There is no gold score.'} Numbers are "
        "means, with ± standard deviations, over seeds. What rises, falls or changes clearly does "
        f"so by more than {CLEAR} standard errors of the difference, question by question."
    )
    sentences = [*over_optimization(results), *penalty_against_stopping(results)]
    blocks = [f"# Analysis of {results.folder}", intro]
    blocks += _part(Part("Models", sentences, summary(results)), level=2)
    for heading, parts in parts_by_chapter.items():
        blocks.append(f"## {heading}")
        for part in parts:
            blocks += _part(part, level=3)
    blocks += ["### Curves", "![curves of all runs](training.png)"]
    return "\n\n".join(blocks) + "\n"


def _part(part: Part, level: int) -> list[str]:
    """Return the blocks of a part, whose heading has a level."""
    blocks = [f"{'#' * level} {part.heading}", "\n".join(f"- {text}" for text in part.sentences)]
    if part.table:
        blocks.append(markdown(part.table))
    return [block for block in [*blocks, part.note] if block]
