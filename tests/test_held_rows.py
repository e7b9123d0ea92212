"""`rlhf-trl evaluate` on pairs and answers of one's own: loss, accuracy, margins, by hand."""

import json
import math

import pytest
import torch
from own_model import conversations, judged, preferences, said, write_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_trl import cli
from rlhf_trl.run.named import load_run

BETA = 0.5


@pytest.fixture(scope="module")
def moved(own_model, tmp_path_factory):
    """The folder of a model that has moved away from `own_model`."""
    folder = tmp_path_factory.mktemp("moved") / "model"
    model = AutoModelForCausalLM.from_pretrained(own_model)
    torch.manual_seed(4)
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(own_model).save_pretrained(folder)
    return folder


@pytest.fixture
def evaluate(own_model, moved, tmp_path, monkeypatch, capfd):
    """Evaluate `own_model`, where the run starts, and `moved` on rows; return table or numbers."""

    def evaluate(rows, *words, json_too=True, **settings):
        monkeypatch.chdir(tmp_path)
        config = {"output_dir": "out", "use_cpu": True, "model_name_or_path": str(own_model)}
        config |= {"max_completion_length": 3, "per_device_eval_batch_size": 5, **settings}
        train = write_lines(tmp_path / "train.jsonl", TRAINED[tuple(rows[0])])
        held = write_lines(tmp_path / "held.jsonl", rows)
        paths = {"source": "path", "path": str(train), "eval_path": str(held)}
        config["dataset"] = {**paths, **config.pop("dataset", {})}
        (tmp_path / "run.yaml").write_text(json.dumps(config))  # JSON is YAML
        capfd.readouterr()
        options = ["--config", "run.yaml", *(["--json"] if json_too else []), *words]
        cli.main(["evaluate", str(own_model), str(moved), *options])
        out = capfd.readouterr().out
        if not json_too:
            return out
        numbers = json.loads(out)["models"]
        return numbers[str(own_model)], numbers[str(moved)]

    return evaluate


def other(text):
    """A prompt that is not among those in own_model.py."""
    return [said("user", f"Once more: {text}")]


PAIRS = [{**row, "prompt": other(row["prompt"][0]["content"])} for row in preferences()[:9]]
PAIRS[7]["prompt"] = PAIRS[8]["prompt"] = PAIRS[6]["prompt"]  # three pairs of one prompt
LABELED = [{**row, "prompt": other(row["prompt"][0]["content"])} for row in judged()[:8]]
TALKS = [
    {"messages": [*other(row["messages"][0]["content"]), *row["messages"][1:]]}
    for row in conversations()[:6]
]
TALKS[1]["messages"] = TALKS[1]["messages"][:2]
TALKS[2]["messages"].insert(0, said("system", "Answer at length."))
TALKS[3]["messages"][-1] = said("assistant", "It is the one that you named first.")
TRAINED = {tuple(rows[0]): rows for rows in (preferences(), judged())}
TRAINED[("messages",)] = conversations()


@torch.no_grad()
def token_logps(model, tokenizer, prompt, answer):
    """(T,) log-probabilities of the tokens of an answer, and whether each is the likeliest."""
    start = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([*prompt, *answer], tokenize=False)
    assert whole.startswith(start)
    start, whole = (tokenizer(text, return_tensors="pt")["input_ids"] for text in (start, whole))
    logits = model(whole).logits[0, start.shape[1] - 1 : -1]
    wanted = whole[0, start.shape[1] :]
    return logits.log_softmax(-1)[range(len(wanted)), wanted], logits.argmax(-1) == wanted


def by_hand(own_model, moved):
    tokenizer = AutoTokenizer.from_pretrained(own_model)
    models = [AutoModelForCausalLM.from_pretrained(at).eval() for at in (own_model, moved)]
    return models, lambda model, *text: token_logps(model, tokenizer, *text)


def clustered(values, groups, weights=None):
    """Mean and standard error by group, with the formula of a ratio of sums."""
    weights = weights or [1] * len(values)
    mean = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
    sums = dict.fromkeys(groups, 0.0)
    for value, group, weight in zip(values, groups, weights, strict=True):
        sums[group] += weight * (value - mean)
    count = len(sums)
    squares = sum(residual**2 for residual in sums.values())
    return mean, math.sqrt(squares * count / (count - 1)) / sum(weights)


def close(result, values, groups, weights=None):
    mean, error = clustered(values, groups, weights)
    assert result["value"] == pytest.approx(mean, abs=1e-5)
    assert result["error"] == pytest.approx(error, abs=1e-5)


PROMPTS = [json.dumps(row["prompt"]) for row in PAIRS]


def test_pairs_after_dpo(evaluate, own_model, moved):
    start, end = evaluate(PAIRS, algorithm="dpo", beta=BETA)
    (before, after), logps = by_hand(own_model, moved)
    rewards = []
    for row in PAIRS:
        sides = [(row["prompt"], row[side]) for side in ("chosen", "rejected")]
        gaps = [logps(after, *text)[0].sum() - logps(before, *text)[0].sum() for text in sides]
        rewards.append([BETA * float(gap) for gap in gaps])
    margins = [chosen - rejected for chosen, rejected in rewards]
    assert 0 < sum(margin > 0 for margin in margins) < len(margins)
    close(end["eval_rewards/margins"], margins, PROMPTS)
    close(end["eval_pair_accuracy"], [float(margin > 0) for margin in margins], PROMPTS)
    losses = [math.log1p(math.exp(-margin)) for margin in margins]
    close(end["eval_loss"], losses, PROMPTS)
    for model, result in ((before, start), (after, end)):
        for side in ("chosen", "rejected"):
            sums = [float(logps(model, row["prompt"], row[side])[0].sum()) for row in PAIRS]
            close(result[f"eval_logps/{side}"], sums, PROMPTS)
    # the start is its own reference: each pair is a tie
    assert start["eval_pair_accuracy"]["value"] == 0.5
    assert start["eval_rewards/margins"]["value"] == 0
    assert start["eval_loss"]["value"] == pytest.approx(math.log(2), abs=1e-6)
    gap = end["eval_loss"]
    close(
        {"value": gap["difference"], "error": gap["difference_error"]},
        [loss - math.log(2) for loss in losses],
        PROMPTS,
    )


def test_the_table_of_pairs(evaluate, own_model):
    lines = evaluate(PAIRS, json_too=False, algorithm="dpo", beta=BETA).splitlines()
    assert lines[0] == "9 held-out pairs of run.yaml"
    names = [line.split("  ")[0] for line in lines[3:] if not line.startswith(" ")]
    assert names[:3] == ["loss", "pair accuracy", "rewards/margins"]
    assert f"rewards: relative to {own_model}, the run's start" in lines[-2]


def test_pairs_after_orpo(evaluate, own_model, moved):
    _, result = evaluate(PAIRS, algorithm="orpo", beta=BETA)
    (_, after), logps = by_hand(own_model, moved)
    losses = []
    for row in PAIRS:
        chosen, rejected = (
            float(logps(after, row["prompt"], row[side])[0].mean())
            for side in ("chosen", "rejected")
        )
        odds = [logp - math.log1p(-math.exp(logp)) for logp in (chosen, rejected)]
        losses.append(-chosen + BETA * math.log1p(math.exp(odds[1] - odds[0])))
    close(result["eval_loss"], losses, PROMPTS)


def test_pairs_after_simpo_which_reads_no_reference(evaluate, own_model, moved):
    settings = {"algorithm": "simpo", "beta": 2.0, "gamma_beta_ratio": 0.25, "nll_weight": 0.5}
    result = evaluate(PAIRS, **settings)
    models, logps = by_hand(own_model, moved)
    for model, numbers in zip(models, result, strict=True):
        margins, losses = [], []
        for row in PAIRS:
            chosen, rejected = (
                float(logps(model, row["prompt"], row[side])[0].mean())
                for side in ("chosen", "rejected")
            )
            margins.append(2.0 * (chosen - rejected))
            losses.append(math.log1p(math.exp(-(margins[-1] - 0.5))) - 0.5 * chosen)
        close(numbers["eval_rewards/margins"], margins, PROMPTS)
        close(numbers["eval_loss"], losses, PROMPTS)
        close(numbers["eval_pair_accuracy"], [float(margin > 0) for margin in margins], PROMPTS)


def test_labeled_answers_after_kto(evaluate, own_model, moved):
    start, end = evaluate(LABELED, algorithm="kto", beta=BETA)
    (before, after), logps = by_hand(own_model, moved)
    for side, label in (("chosen", True), ("rejected", False)):
        rows = [row for row in LABELED if row["label"] is label]
        texts = [(row["prompt"], row["completion"]) for row in rows]
        sums = [[float(logps(m, *text)[0].sum()) for text in texts] for m in (before, after)]
        rewards = [BETA * (new - old) for old, new in zip(*sums, strict=True)]
        prompts = [json.dumps(row["prompt"]) for row in rows]
        close(end[f"eval_rewards/{side}"], rewards, prompts)
        close(end[f"eval_logps/{side}"], sums[1], prompts)
        assert start[f"eval_rewards/{side}"]["value"] == 0
    assert "eval_loss" not in end and "eval_pair_accuracy" not in end


@pytest.mark.parametrize("turns", ["last", "all"])
def test_answers_after_sft(evaluate, own_model, moved, turns):
    result = evaluate(TALKS, dataset={"turns": turns})
    models, logps = by_hand(own_model, moved)
    prompts = [json.dumps(row["messages"][:-1]) for row in TALKS]
    for model, numbers in zip(models, result, strict=True):
        losses, hits, counts = [], [], []
        for row in TALKS:
            messages = row["messages"]
            ends = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
            ends = ends if turns == "all" else ends[-1:]
            read = [logps(model, messages[:n], messages[n : n + 1]) for n in ends]
            own, right = (torch.cat(columns) for columns in zip(*read, strict=True))
            losses.append(-float(own.mean()))
            hits.append(float(right.float().mean()))
            counts.append(len(own))
        assert len(set(counts)) > 1  # so that tokens do not weigh like answers
        close(numbers["eval_loss"], losses, prompts, counts)
        close(numbers["eval_mean_token_accuracy"], hits, prompts, counts)


def test_what_the_trainers_cut_is_cut(evaluate, own_model, moved):
    """max_length leaves the first tokens of answers; a row without any is left out."""
    (_, after), logps = by_hand(own_model, moved)
    tokenizer = AutoTokenizer.from_pretrained(own_model)
    asked = [
        tokenizer.apply_chat_template(
            row["messages"][:-1], add_generation_prompt=True, tokenize=False
        )
        for row in TALKS
    ]
    starts = [len(ids) for ids in tokenizer(asked)["input_ids"]]
    longest = sorted(starts)[3] + 2
    _, result = evaluate(TALKS, max_length=longest)
    losses, counts, prompts = [], [], []
    for row, start in zip(TALKS, starts, strict=True):
        whole = logps(after, row["messages"][:-1], row["messages"][-1:])[0]
        own = whole[: max(longest - start, 0)]
        if len(own):
            losses.append(-float(own.mean()))
            counts.append(len(own))
            prompts.append(json.dumps(row["messages"][:-1]))
    assert 0 < len(losses) < len(TALKS)
    close(result["eval_loss"], losses, prompts, counts)


# --- the numbers of the trainers -----------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["dpo", "sft"])
def test_the_numbers_are_those_of_the_trainer(evaluate, own_model, moved, tmp_path, recipe):
    if recipe == "dpo":
        from rlhf_trl.trainers.direct_alignment import BookDPOTrainer as Trainer

        settings = {"algorithm": "dpo", "beta": BETA, "max_length": 40}
        _, result = evaluate(PAIRS, **settings)
        names = {"loss": "loss", "rewards/margins": "rewards/margins"}
        names["logps/chosen"] = "logps/chosen"
    else:
        from rlhf_trl.trainers.sft import BookSFTTrainer as Trainer

        _, result = evaluate(TALKS, dataset={"turns": "all"}, max_length=60)
        names = {"loss": "loss", "mean_token_accuracy": "mean_token_accuracy"}
    words = ["--per_device_eval_batch_size", "16", "--report_to", "none"]
    loaded, data = load_run(str(tmp_path / "run.yaml"), words)
    if recipe == "sft":
        loaded.trl.completion_only_loss, loaded.trl.assistant_only_loss = False, True
    arguments = {}
    if recipe == "dpo":
        arguments["ref_model"] = AutoModelForCausalLM.from_pretrained(own_model)
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(moved),
        args=loaded.trl,
        train_dataset=data.train,
        eval_dataset=data.held_out,
        processing_class=AutoTokenizer.from_pretrained(own_model),
        **arguments,
    )
    metrics = trainer.evaluate()
    for ours, theirs in names.items():
        assert result[f"eval_{ours}"]["value"] == pytest.approx(metrics[f"eval_{theirs}"], abs=1e-5)
