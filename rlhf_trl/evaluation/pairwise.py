"""Win rates of models over the first one, answer by answer: by a judge or by a score.

A judge sees each two answers in both orders. A pair is worth 1 to the model whose answer wins in
both, 3/4 where it wins in one and ties in the other, and 1/2 where the orders contradict each
other. Equal answers tie unseen. A pair that lacks a verdict counts nowhere.
"""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from rlhf_trl.errors import InputError, Stopped, nearest
from rlhf_trl.evaluation import tables
from rlhf_trl.evaluation.tables import SCORED_BY
from rlhf_trl.output import JUDGED, read_lines, write_lines, write_whole
from rlhf_trl.rewards.judge import (
    VERDICT,
    Judge,
    LLMJudge,
    Reply,
    conversation_text,
    fill_in,
    last_in_brackets,
    read_rubric,
)

MOST_LOST = 0.05  # share of the judged pairs that may lack a verdict
MOST_INCONSISTENT = 0.2  # share of the judged pairs that may be decided by their order
FEW = 20  # fewer longer, or fewer shorter answers do not tell what length does
# what each verdict is worth to the model: where its answer is B, and where it is A
WORTH = {"a": (0.0, 1.0), "b": (1.0, 0.0), "tie": (0.5, 0.5)}
LEGEND = (
    "A win counts 1 (3/4 where one order is a tie), a tie and an inconsistent pair 1/2; in "
    "brackets: the 95 % interval, by bootstrap over prompts."
)
OF_JUDGES = (
    "Length-controlled: what a logistic regression on the difference of lengths expects of answers "
    "of equal length. Inconsistent: pairs of which the answer that stands first, or second, wins "
    "both times. Equal: answers that tie unseen. Lost: pairs with a request that failed or a reply "
    "without a verdict; they count nowhere. A / B / tie: all verdicts, by position."
)


@dataclass
class Pair:
    """An answer of the first model and one of another to the same prompt."""

    prompt: Any
    first: str  # the first model
    model: str  # the other
    sample: int  # number of both answers
    answers: tuple[str, str]  # the first model's comes first
    by: str = ""  # who decides: a judge and its address, or a score of the file
    scores: tuple[float | None, float | None] = (None, None)  # of the file, where they decide
    replies: list[Reply] = field(default_factory=list)  # with the first model's as A, and as B
    verdicts: list[str | None] = field(default_factory=list)  # of these
    worth: float | None = None  # to the other model; None: lost

    def __post_init__(self) -> None:
        # raises where one is no text, or holds half a character, which no file could
        "".join([conversation_text(self.prompt), *self.answers]).encode()
        if not all(score is None or isinstance(score, int | float) for score in self.scores):
            raise TypeError(f"a score is no number: {self.scores}")

    @property
    def differs(self) -> bool:
        """Whether somebody has to say which answer is better."""
        return self.answers[0] != self.answers[1]


class Outcome:
    """What became of the pairs of one model."""

    def __init__(self, pairs: Sequence[Pair]):
        self.pairs = pairs
        self.usable = [pair for pair in pairs if pair.worth is not None]
        self.lost = [pair for pair in pairs if pair.worth is None]
        self.judged = [pair for pair in self.usable if pair.differs]
        # of which the answer that stands first, or second, wins in both orders
        self.inconsistent = sum(pair.verdicts in (["a", "a"], ["b", "b"]) for pair in self.judged)

    @property
    def loses_too_many(self) -> bool:
        """Whether too many of the pairs that somebody had to judge lack a verdict."""
        return len(self.lost) > MOST_LOST * sum(pair.differs for pair in self.pairs)

    @property
    def is_inconsistent(self) -> bool:
        """Whether the order of the answers decides too often."""
        return self.inconsistent > MOST_INCONSISTENT * len(self.judged)


def win_rates(
    path: str,
    output: str,
    who: LLMJudge | None,
    by: str | None = None,
    models: Sequence[str] = (),
    samples: int = 1,
) -> tuple[str, str | None]:
    """Compare answers of models with those of the first one; write verdicts and a table.

    Args:
        path: of the file of answers that `rlhf-trl evaluate` has written.
        output: what is written, without its suffixes: `.jsonl` has each pair, `.md` the table. A
            judge's replies are kept beside them.
        who: the judge, which gets at most as many requests as its `cap` says.
        by: what decides in place of a judge: a score of the file, or a reward model that it names.
        models: which ones, the first one first; empty: all of the file.
        samples: how many sampled answers to each prompt are judged; 0: the greedy one.

    Returns:
        The table with its legend; and what makes it worthless, or None.

    Raises:
        Stopped: by Ctrl-C; the same call goes on.
    """
    for suffix in (".jsonl", ".md"):
        if Path(output + suffix).exists():
            raise InputError(f"--output: {output}{suffix} exists; name other files.")
    if not Path(output).name or output.endswith(os.sep):
        raise InputError(f"--output: {output} is a folder; name files in it, without a suffix.")
    with _reading(path):
        lines = read_lines(path)
        if not lines:
            raise InputError(f"{path} is empty; let rlhf-trl evaluate --answers write one.")
        first, *others = _chosen(path, [name for name in lines[0] if name != "prompt"], models)
        score = None if by is None else _score_of(lines[0][first]["scores"], by)
        decider = score or f"{who.model} at {who.base_url}"
        pairs = []
        for line in lines:
            pairs += _pairs(line, first, others, samples, decider, score)
    if not others:
        raise InputError(f"there is one model only, {first}; a win rate takes two, of one file.")
    if score is None:
        decided = f"judged by {decider}"
        _judge(pairs, who, Path(output).with_name(JUDGED))
    else:
        kind = "a reward model's score" if score.startswith(SCORED_BY) else "a score"
        decided = f"by {score}, {kind}, not by a judge"
        _compare_scores(pairs)
    answers = f"sampled answers, {samples}" if samples else "the greedy answer"
    heading = f"Win rate over {first}, {decided}; {answers} to each prompt of {path}"
    table, notes = [], [LEGEND if score else f"{LEGEND} {OF_JUDGES}"]
    for model in others:
        outcome = Outcome([pair for pair in pairs if pair.model == model])
        table.append({"model": model, **_cells(outcome)})
        if outcome.is_inconsistent:
            count, judged = outcome.inconsistent, len(outcome.judged)
            notes.append(
                f"{model}: not usable. {count} of {judged} judged pairs ({count / judged:.0%}) are "
                "inconsistent, which draws the win rate towards 1/2."
            )
    write_lines(f"{output}.jsonl", map(asdict, pairs), ensure_ascii=False)
    page = [f"# {heading}", tables.markdown(table), *notes]
    write_whole(f"{output}.md", "\n\n".join(page) + "\n")
    files = f"all verdicts are in {output}.jsonl, this table in {output}.md"
    return "\n\n".join([heading, tables.text(table), *notes, files]), _fault(Outcome(pairs))


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Say in one sentence what is wrong with the file of answers that the block reads."""
    remedy = "let rlhf-trl evaluate --answers write one"
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name a file.") from error
    except KeyError as error:
        raise InputError(f"{path} is no file of answers (it lacks {error}); {remedy}.") from error
    except (IndexError, ValueError, AttributeError, TypeError) as error:
        raise InputError(f"{path} is no file of answers ({error}); {remedy}.") from error


def _chosen(path: str, names: Sequence[str], models: Sequence[str]) -> Sequence[str]:
    """Return the `models` to compare, by default all of the `names` in the file at `path`."""
    for model in models:
        if model not in names:
            known = ", ".join(names)
            raise InputError(
                f"--models: {path} lacks {model}{nearest(model, names)}; it has {known}."
            )
    return [*dict.fromkeys(models or names)]


def _score_of(scores: Mapping[str, Any], by: str) -> str:
    """Return the score that `by` names: itself, or that of the reward model in a folder."""
    folders = Path(by).parts
    for name in scores:
        if name == by or name.removeprefix(SCORED_BY) in folders:
            return name
    raise InputError(
        f"--by: the answers have no score {by}{nearest(by, scores)}, but {', '.join(scores)}; "
        "rlhf-trl evaluate --reward_model RUN adds a reward model's."
    )


def _pairs(
    line: Mapping[str, Any],
    first: str,
    others: Sequence[str],
    samples: int,
    by: str,
    score: str | None,
) -> Iterator[Pair]:
    """Yield the pairs of a line of the file, with the `score` of each answer, if there is one."""
    count = min(len(line[model]["samples"]) for model in (first, *others))
    if not 0 <= samples <= count:
        raise InputError(
            f"--samples is {samples}; write 0 (the greedy answer) to {count}, or let rlhf-trl "
            "evaluate --samples make more."
        )
    for model in others:
        for number in range(samples or 1):
            texts, scores = [], []
            for entry in (line[first], line[model]):
                sample = entry["samples"][number] if samples else entry
                texts.append(sample["text" if samples else "greedy"])
                scores.append(sample["scores"].get(score))
            yield Pair(line["prompt"], first, model, number, tuple(texts), by, tuple(scores))


def _compare_scores(pairs: Sequence[Pair]) -> None:
    """Let the higher score win."""
    for pair in pairs:
        first, second = pair.scores
        if first is not None and second is not None:
            pair.worth = 0.5 + 0.5 * ((second > first) - (second < first))


def _judge(pairs: Sequence[Pair], who: LLMJudge, kept: Path) -> None:
    """Let a judge compare the pairs, in both orders; print what that takes before it begins."""
    needed = ["prompt", "answer_a", "answer_b"]
    rubric = read_rubric(who.rubric, "pair_rubric.txt", needed, "--rubric")
    kept.parent.mkdir(parents=True, exist_ok=True)
    # a reply without a verdict is not kept: the same command asks once more
    judge = Judge(who, kept, keeps=lambda reply: last_in_brackets(reply, VERDICT))
    judged = [pair for pair in pairs if pair.differs]
    questions = []
    for pair in judged:
        for answers in (pair.answers, pair.answers[::-1]):
            texts = [conversation_text(pair.prompt), *answers]
            questions.append(fill_in(rubric, dict(zip(needed, texts, strict=True))))
    unasked = judge.unasked(questions)
    tokens = sum(map(len, unasked)) // 4  # a token has four characters, roughly
    print(f"{len(unasked):,} requests to {who.base_url}, of about {tokens:,} tokens in all")
    if len(unasked) > who.cap:
        raise InputError(
            f"--max_requests is {who.cap}, and {len(unasked)} would be sent; raise it, or compare "
            "fewer --models or --samples."
        )
    try:
        with tqdm(total=len(unasked), disable=None) as bar:  # shown on a terminal only
            replies = asyncio.run(judge.ask(questions, bar.update))
    except KeyboardInterrupt:
        wanted = {*questions}
        count = len(wanted) - len(judge.unasked(questions))
        print(f"\ninterrupted; {kept} keeps {count} of {len(wanted)} verdicts, and the same "
              "command goes on", flush=True)  # fmt: skip
        raise Stopped(128 + signal.SIGINT) from None
    print(f"{judge.requests:,} requests were sent, some of them again where the first failed")
    for number, pair in enumerate(judged):
        pair.replies = replies[2 * number : 2 * number + 2]
        pair.verdicts = [last_in_brackets(reply, VERDICT) for reply in pair.replies]
        if None not in pair.verdicts:
            pair.worth = sum(WORTH[verdict][n] for n, verdict in enumerate(pair.verdicts)) / 2
    for pair in pairs:
        if not pair.differs:
            pair.worth = 0.5


def _cells(outcome: Outcome) -> dict[str, str]:
    """Return a model's cells of the table; those of judges only where a judge has judged."""
    worths = [pair.worth for pair in outcome.usable]
    # a pair whose two orders contradict each other is worth 0.5 as well, and is no tie
    ties = worths.count(0.5) - outcome.inconsistent
    cells = {
        "win rate": "-",
        "wins": f"{sum(worth > 0.5 for worth in worths)}",
        "ties": f"{ties}",
        "losses": f"{sum(worth < 0.5 for worth in worths)}",
        "lost": f"{len(outcome.lost)}",
    }
    if worths:
        rate, low, high = rate_and_interval(outcome.usable)
        cells["win rate"] = f"{rate:.3f} ({low:.3f} to {high:.3f})"
    verdicts = Counter(verdict for pair in outcome.pairs for verdict in pair.verdicts)
    if verdicts:
        controlled = length_controlled(outcome.usable)
        cells |= {
            "inconsistent": f"{outcome.inconsistent}",
            "equal": f"{sum(not pair.differs for pair in outcome.pairs)}",
            "length-controlled": "-" if controlled is None else f"{controlled:.3f}",
            "A / B / tie": " / ".join(f"{verdicts[verdict]}" for verdict in WORTH),
        }
    return cells


def _fault(outcome: Outcome) -> str | None:
    """Return the sentence about too many lost pairs, or None."""
    if not outcome.loses_too_many:
        return None
    reasons = []
    for pair in outcome.lost:
        for reply, verdict in zip(pair.replies, pair.verdicts, strict=True):
            if verdict is None:
                reasons.append(reply.fault or f"no verdict in {reply.text[-80:]!r}")
    reason, count = Counter(reasons or ["no score"]).most_common(1)[0]
    judged = sum(pair.differs for pair in outcome.pairs)
    return (
        f"{len(outcome.lost)} of {judged} pairs of different answers are lost, more than "
        f"{MOST_LOST:.0%}, most often by {reason} ({count} times); the same command asks for these "
        "once more."
    )


def rate_and_interval(pairs: Sequence[Pair]) -> tuple[float, float, float]:
    """Return the win rate of pairs with its 95 % interval, by bootstrap over prompts."""
    by_prompt: dict[str, list[float]] = {}
    for pair in pairs:
        by_prompt.setdefault(json.dumps(pair.prompt), []).append(pair.worth)
    sums = np.array([sum(worths) for worths in by_prompt.values()])
    counts = np.array([len(worths) for worths in by_prompt.values()])
    draws = np.random.default_rng(0).integers(len(sums), size=(2000, len(sums)))
    rates = sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    low, high = np.quantile(rates, [0.025, 0.975])
    return float(sums.sum() / counts.sum()), float(low), float(high)


def length_controlled(pairs: Sequence[Pair]) -> float | None:
    """Return the win rate to expect of answers of equal length, in the manner of AlpacaEval 2.

    That is s(a) in the logistic regression s(a + b tanh(d / sd(d))) of what judged pairs are worth
    on d, by how many characters the model's answer is longer; equal answers tie. None with fewer
    than 20 longer or fewer than 20 shorter answers.
    """
    judged = [pair for pair in pairs if pair.differs]
    longer = np.array([len(pair.answers[1]) - len(pair.answers[0]) for pair in judged])
    if min((longer > 0).sum(), (longer < 0).sum()) < FEW:
        return None
    worths = np.array([pair.worth for pair in judged])
    inputs = np.stack([np.ones(len(judged)), np.tanh(longer / longer.std())])
    weights = np.zeros(2)
    ridge = np.diag([1e-6, 1e-2])  # keeps b finite where length alone decides
    for _ in range(50):  # steps of Newton's method, of limited length
        expected = 1 / (1 + np.exp(-weights @ inputs))
        gradient = inputs @ (worths - expected) - ridge @ weights
        curvature = (inputs * expected * (1 - expected)) @ inputs.T + ridge
        weights += np.clip(np.linalg.solve(curvature, gradient), -2, 2)
    rate = 1 / (1 + np.exp(-weights[0]))
    return float((rate * len(judged) + 0.5 * (len(pairs) - len(judged))) / len(pairs))
