"""How the runs of a pipeline went: what an improvement cost, and how steady training was."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from rlhf_trl.evaluation.measured import HEADLINES
from rlhf_trl.pipeline.failures import Part, cell
from rlhf_trl.pipeline.frontier import CLEAR, change
from rlhf_trl.pipeline.lineage import Run
from rlhf_trl.pipeline.results import Results, over_seeds, with_content
from rlhf_trl.pipeline.runs import curves_of

KL_KEYS = ("kl", "policy/approxkl_avg")  # the names under which trainers log a KL
SCORES = [key for key in HEADLINES if key != "loss"]  # names of scores: the higher, the better
# Headings of steadiness.
GRADIENT = "Largest gradient norm"
GRADIENT_IN_MEDIANS = "Largest gradient norm, in medians"
RISE = "Largest rise of the KL"
RISE_IN_MEDIANS = "Largest rise of the KL, in medians"
FALL = "Largest fall"
RESTARTS = "Restarts"
# Columns of the costs: their heading, and the file, key, factor and digits of the number.
COSTS = {
    "CPU s": ("cost.json", "cpu_seconds", 1, 1),
    "starts": ("cost.json", "starts", 1, 0),
    "peak memory, GB": ("cost.json", "peak_memory_bytes", 1e-9, 2),
    "device's peak, GB": ("summary.json", "peak_memory_bytes", 1e-9, 2),
    "training, s": ("summary.json", "train_seconds", 1, 1),
    "processes": ("summary.json", "processes", 1, 0),
}
COSTS_NOTE = (
    "Of one run. CPU s: of all its starts, what a killed start has lost included. Peak memory: of "
    "its largest process; the device's is that of the GPU where there is one. Training, s: by the "
    "clock, from the first step to the last; times the processes, these are GPU seconds where each "
    "has a GPU. Accepted gain: how far the gold of sampled answers is above the reference's, where "
    f"that is by more than {CLEAR} standard errors of the difference; its price counts the run and "
    "those that it was made from."
)
LIMITS = {GRADIENT_IN_MEDIANS: 10, RISE_IN_MEDIANS: 10, RESTARTS: 0}  # runs above these are named


def training(results: Results) -> list[Part]:
    """Return what is known of the training of all stages."""
    return [_costs(results), _stability(results)]


def _costs(results: Results) -> Part:
    """Return what a run of each stage took, and what it paid for an accepted gain.

    The price is the CPU seconds of the run, and of the runs that it was made from, for 0.01 of the
    gain. Without an accepted gain, gain and price are NaN, which `over_seeds` shows as "-".
    """
    table, sentences = [], []
    total = [0.0] * len(results.seeds)  # CPU seconds of a seed's runs
    for name in results.stages:
        line = {"stage": results.title(name)}
        for heading, (file, key, factor, digits) in COSTS.items():
            values = [_cost(results, name, seed, file, key) for seed in results.seeds]
            line[heading] = over_seeds([value * factor for value in values], digits)
        gains = [accepted_gain(results, name, seed) for seed in results.seeds]
        line["accepted gain"] = over_seeds(gains)
        stages_paid_for = _with_sources(results, name)
        prices = []
        for seed, gain in enumerate(gains):
            total[seed] += _cpu_seconds(results, name, seed)
            cpu_seconds = sum(_cpu_seconds(results, stage, seed) for stage in stages_paid_for)
            prices.append(cpu_seconds * 0.01 / gain)
        line["CPU s per 0.01 gained"] = price = over_seeds(prices, 2)
        if price != "-":
            sentences.append(f"{line['stage']} paid {price} CPU s for 0.01 of gold.")
        table.append(line)
    table.append({key: "-" for key in table[0]} | {"stage": "all", "CPU s": over_seeds(total, 1)})
    if results.gold and not sentences:
        sentences.append("No run has an accepted gain.")
    return Part("Costs", sentences, with_content(table), COSTS_NOTE)


def _cost(results: Results, stage: str, seed: int, file: str, key: str) -> float:
    """Return a number that a run has left in a file, or NaN."""
    value = results.read_json(stage, seed, file).get(key)
    return math.nan if value is None else value


def _cpu_seconds(results: Results, stage: str, seed: int) -> float:
    """Return the CPU seconds of a run, or NaN."""
    return _cost(results, stage, seed, "cost.json", "cpu_seconds")


def _with_sources(results: Results, stage: str) -> set[str]:
    """Return a stage and the stages whose models it reads, directly or not."""
    inputs = results.stages[stage].get("inputs", {}).values()
    stages = {stage}
    for models in inputs:
        for model in models:
            if model in results.stages:  # others are in a folder, or on the hub
                stages |= _with_sources(results, model)
    return stages


def accepted_gain(results: Results, stage: str, seed: int) -> float:
    """Return how far gold is above the reference's, NaN where that is not clear."""
    ends = [results.answers.get((name, None, seed)) for name in (results.reference, stage)]
    if None in ends or change(*ends, "gold") < 1:
        return math.nan
    return ends[1].mean("gold") - ends[0].mean("gold")


def _stability(results: Results) -> Part:
    """Return how steady the runs of each stage were, and which of them stand out."""
    runs = {
        (name, seed): steadiness(results, name, seed)
        for name in results.stages
        for seed in results.seeds
    }
    table = []
    for name in results.stages:
        line = {"stage": results.title(name)}
        for key in next(iter(runs.values())):
            line[key] = cell([runs[name, seed][key] for seed in results.seeds])
        table.append(line)
    sentences = []
    for key, limit in LIMITS.items():
        above = [
            f"{results.title(name)} with seed {seed} ({numbers[key]:.4g})"
            for (name, seed), numbers in runs.items()
            if numbers[key] > limit
        ]
        known = sum(not math.isnan(numbers[key]) for numbers in runs.values())
        which = f": {', '.join(above)}" if above else ""
        count = f"above {limit} in {len(above)} of {known} runs" if known else "no run tells"
        sentences.append(f"{key}: {count}{which}.")
    note = (
        "Of what a run logged. The median is that of the run's gradient norms, or of the sizes of "
        "its KL's changes from one entry to the next; the KL is the trainer's own estimate, not "
        "that of the answers. A fall is one of the first score of the evaluations, from its best "
        "before."
    )
    return Part("Stability", sentences, with_content(table), note)


def steadiness(results: Results, stage: str, seed: int) -> dict[str, float]:
    """Return how steady a run was, a number for each heading; NaN: the run has not logged it."""
    curves = curves_of(Run(results.run(stage, seed)))  # {name: {step: value}}
    # a norm that is no number counts as infinite
    norms = [v if math.isfinite(v) else math.inf for v in curves.get("grad_norm", {}).values()]
    # the first KL, and the first score of evaluations, that the run has logged
    kl = next((curves[key] for key in KL_KEYS if key in curves), {})
    rises = [after - before for before, after in pairwise(kl.values())]
    score = next((curves[f"eval_{key}"] for key in SCORES if f"eval_{key}" in curves), {})
    values = list(score.values())
    falls = [max(values[:place]) - values[place] for place in range(1, len(values))]
    return {
        GRADIENT: max(norms, default=math.nan),
        GRADIENT_IN_MEDIANS: _largest_over_median(norms),
        RISE: max(rises, default=math.nan),
        RISE_IN_MEDIANS: _largest_over_median(rises),
        FALL: max([0.0, *falls]) if values else math.nan,
        RESTARTS: results.read_json(stage, seed, "cost.json").get("starts", 1) - 1,
    }


def _largest_over_median(values: Sequence[float]) -> float:
    """Return the largest value, divided by the median of all sizes; NaN if that is 0."""
    typical = median(map(abs, values)) if values else 0.0
    return max(values) / typical if typical else math.nan
