"""A trained reward model scores a text in GRPO as it scored it in training."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from direct_alignment_cases import message
from peft import LoraConfig
from policy_gradient_cases import build as build_policy
from policy_gradient_cases import checkpoint
from reward_model_cases import END, SEPARATOR, asked, build, ids, outputs
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rlhf_trl.errors import InputError
from rlhf_trl.reward_models.reader import Reader
from rlhf_trl.rewards import from_model as reward_model
from rlhf_trl.rewards.from_model import load_reward_model
from rlhf_trl.tiny.tokenizer import build_tokenizer

ARGS = SimpleNamespace(device="cpu")
EOS = 5
START, STOP = "<think></think><answer>", "</answer>"
# completions, whether they ended by themselves, and a process model's steps, written by hand
COMPLETIONS = [
    (f"{START}nus{STOP}", True, [f"{START}n", "u", "s", STOP]),
    (f"{START}a{STOP}", True, [f"{START}a", STOP]),
    (f"{START}sesuoh", False, [f"{START}sesuoh"]),
    (f"{START}eert{STOP}", False, [f"{START}e", "e", "r", "t", STOP]),
    ("<think>x", False, ["<think>x"]),
    (START, True, [START]),
    (f"{START}dA_9{STOP}", True, [f"{START}d", "A", "_", "9", STOP]),
    ("nus", True, ["nus"]),
    ("a b\nc", False, ["a b\nc"]),
]
KINDS = {
    "reward": ("reward", "chapter"),
    "kwise": ("kwise", "chapter"),
    "orm": ("orm", "chapter"),
    "prm": ("prm", "code"),
    "prm-binary": ("prm", "chapter"),
}


def rows_of(name):
    """Return training rows that hold the completions; the others are cut off only as a reward."""
    rows = []
    for n, (text, finished, steps) in enumerate(COMPLETIONS):
        answer, row = message("assistant", text), {"prompt": message("user", "sun" * (n % 3 + 1))}
        if name == "reward":
            row |= {"chosen": answer, "rejected": message("assistant", "b" * (n + 1))}
        elif name == "kwise":
            row["ranked"] = [answer, message("assistant", "b" * (n + 1)), message("assistant", "c")]
        elif name == "orm":
            row |= {"completion": answer, "label": n % 2 == 0, "finished": finished}
        else:
            row |= {"completions": steps, "labels": [1] * (len(steps) - 1) + [n % 2 * 2 - 1]}
        rows.append(row)
    return rows


def trained(kind, folder, peft=None, learning_rate=3e-3, **config):
    """Return a trainer after two steps, which has saved its model in the folder."""
    name, which = KINDS[kind]
    trainer = build(
        name,
        which,
        rows=rows_of(name),
        output_dir=str(folder),
        max_steps=2,
        learning_rate=learning_rate,
        max_length=128,
        peft=peft,
        **config,
    )
    trainer.train()
    trainer.save_model()
    trainer.model.eval()
    return trainer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return (folder, trainer) of a kind, trained once."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = str(folder), trained(kind, folder)
        return made[kind]

    return get


def as_policy(texts, finished):
    """Return what GRPO hands to a reward function."""
    return {
        "completions": [message("assistant", text) for text in texts],
        "completion_ids": [ids(t) + [EOS] * f for t, f in zip(texts, finished, strict=True)],
    }


def in_grpo(folder, aggregate=None, rows=COMPLETIONS, prompts=None):
    function = load_reward_model(folder, build_tokenizer(), ARGS, aggregate)
    texts, finished, _ = zip(*rows, strict=True)
    prompts = prompts or [row["prompt"] for row in rows_of("orm")]
    return function(prompts=prompts[: len(rows)], **as_policy(texts, finished))


def logits_in_training(trainer, name, n):
    """Return the model's outputs on the trainer's own row, without padding; None: never seen."""
    row = trainer.train_dataset[n]
    with torch.no_grad():
        if name in ("reward", "kwise"):
            if not COMPLETIONS[n][1]:
                return None  # preferences are between finished texts
            whole = row["chosen_ids"] if name == "reward" else row["ranked_ids"][0]
            return trainer.model(input_ids=torch.tensor([whole])).logits[0]
        places = [i for i, label in enumerate(row["labels"]) if label != -100]
        return trainer.model(input_ids=torch.tensor([row["input_ids"]])).logits[0, places]


def by_hand(name, logits, aggregate):
    if name in ("reward", "kwise"):
        return float(logits)
    if logits.shape[1] == 1:
        each = [1 / (1 + math.exp(-x)) for x in logits[:, 0].tolist()]
    else:
        each = [math.exp(z) / sum(map(math.exp, (x, y, z))) for x, y, z in logits.tolist()]
    how = {"mean": lambda p: sum(p) / len(p), "last": lambda p: p[-1]}
    return {**how, "min": min, "product": math.prod}[aggregate](each)


CASES = [("reward", None), ("kwise", None), ("orm", "mean"), ("orm", "last")]
CASES += [(k, a) for k in ("prm", "prm-binary") for a in ("last", "min", "product")]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("kind", "aggregate"), CASES)
def test_a_training_text_scores_the_same_in_grpo(models, monkeypatch, kind, aggregate, batch):
    monkeypatch.setattr(reward_model, "BATCH", batch)
    folder, trainer = models(kind)
    name, found = kind.partition("-")[0], in_grpo(folder, aggregate)
    checked = 0
    for n, score in enumerate(found):
        logits = logits_in_training(trainer, name, n)
        if logits is not None:
            assert score == pytest.approx(by_hand(name, logits, aggregate), abs=2e-6)
            checked += 1
    assert checked == (5 if name in ("reward", "kwise") else 9)
    assert max(found) - min(found) > 1e-3


@pytest.mark.parametrize("kind", ["reward", "kwise", "orm"])
def test_a_cut_off_completion_does_not_look_finished(models, kind):
    folder, trainer = models(kind)
    prompt, text = rows_of("orm")[2], f"{START}sesuoh"
    rows = [(text, False, None), (text, True, None)]
    found = in_grpo(folder, rows=rows, prompts=[prompt["prompt"]] * 2)
    for end, score in zip(("", END), found, strict=True):
        whole, before = ids(asked(prompt) + text + end), len(ids(asked(prompt)))
        places = range(before, len(whole)) if kind == "orm" else [len(whole) - 1]
        with torch.no_grad():
            logits = outputs(trainer.model, whole, list(places))
        expected = by_hand(kind, logits, "mean")
        assert score == pytest.approx(expected, abs=2e-6)
    assert abs(found[0] - found[1]) > 1e-3


def test_the_books_code_scores_an_outcome_by_its_last_token():
    assert Reader("orm", "code").names[0] == "last"
    assert Reader("orm", "chapter").names[0] == "mean"


def test_the_usual_aggregate(models):
    for kind, usual in (("orm", "mean"), ("prm", "min")):
        folder, _ = models(kind)
        assert in_grpo(folder) == in_grpo(folder, usual)


@pytest.mark.parametrize("kind", ["reward", "kwise", "orm", "prm"])
def test_candidates_score_the_same_in_evaluation(models, kind):
    folder, trainer = models(kind)
    rows = rows_of("orm")
    trainer.candidates = rows
    found = trainer._score_candidates()
    for aggregate in found[0]:
        one = in_grpo(folder, None if aggregate == "score" else aggregate)
        assert [s[aggregate] for s in found] == pytest.approx(one, abs=2e-6)


@pytest.mark.parametrize("aggregate", ["last", "min", "product"])
def test_a_completion_without_steps_is_worth_nothing(models, aggregate):
    folder, _ = models("prm")
    rows = [(" \n", True, None), ("", False, None), ("a", True, None)]
    assert in_grpo(folder, aggregate, rows)[:2] == [0, 0] < in_grpo(folder, aggregate, rows)[2:]


def test_an_empty_completion_that_is_cut_off_is_worth_nothing_to_an_outcome_model(models):
    folder, _ = models("orm")
    assert in_grpo(folder, rows=[("", False, None)]) == [0]
    assert in_grpo(folder, rows=[("", True, None)])[0] > 0  # its end is a token


def test_an_answer_is_finished_where_the_trainer_says_so(models):
    """Whichever of the policy's end tokens it was; the end is then the reward model's own."""
    folder, _ = models("orm")
    function = load_reward_model(folder, build_tokenizer(), ARGS)
    given = {"prompts": ["ab"] * 3, "completions": ["cd"] * 3}
    by_token = function(**given, completion_ids=[[75, 76, EOS], [75, 76, 9], [75, 76, 9]])
    told = function(**given, completion_ids=[[75, 76, 9]] * 3, finished=[True, False, True])
    expected = [by_token[0], by_token[1], by_token[0]]
    assert told == pytest.approx(expected, abs=1e-6)
    assert abs(by_token[0] - by_token[1]) > 1e-3


def test_thoughts_are_not_read_if_that_is_asked(models):
    folder, _ = models("orm")
    said = {
        "cd": "cd",
        "<think>ab</think>\n\ncd": "cd",
        "<think>ab</think>c<think>\nab</think>d": "cd",
        "ab</think> cd": "cd",  # opened by the prompt
        "cd<think>ab": "cd",  # cut off
    }
    read, plain = (
        load_reward_model(folder, build_tokenizer(), ARGS, None, strips) for strips in (True, False)
    )

    def scores(function, texts):
        return function(prompts=["ab"] * len(texts), **as_policy(texts, [True] * len(texts)))

    expected = scores(plain, list(said.values()))
    assert scores(read, list(said)) == pytest.approx(expected, abs=2e-6)
    assert scores(plain, list(said))[1:] != pytest.approx(expected[1:], abs=1e-3)
    given = {"prompts": ["ab"], "completion_ids": [[EOS]]}
    text = {"completions": ["<think>ab</think>cd"]}
    assert read(**given, **text) == plain(**given, completions=["cd"])


@pytest.mark.parametrize("kind", ["reward", "orm", "prm"])
def test_plain_texts(tmp_path, kind):
    """Prompt and completion are texts, not messages."""
    name, which = KINDS[kind]
    row = {"prompt": "ab"} | {
        "reward": {"chosen": "cd", "rejected": "d"},
        "orm": {"completion": "cd", "label": True},
        "prm": {"completions": ["cd"], "labels": [1]},
    }[kind]
    trainer = build(name, which, rows=[row], output_dir=str(tmp_path))
    trainer.save_model()
    trainer.model.eval()
    function = load_reward_model(str(tmp_path), build_tokenizer(), ARGS)
    given = {"prompts": ["ab"] * 2, "completions": ["cd"] * 2}
    found = function(**given, completion_ids=[[75, 76, EOS], [75, 76]])
    for score, end in zip(found, (END, ""), strict=True):
        text, places = {
            "reward": ("abcd" + end, [-1]),
            "orm": ("abcd" + end, list(range(2, 4 + bool(end)))),
            "prm": ("abcd" + SEPARATOR, [-1]),
        }[kind]
        with torch.no_grad():
            logits = outputs(trainer.model, ids(text), places)
        assert score == pytest.approx(by_hand(name, logits, "mean"), abs=2e-6)


@pytest.mark.parametrize("conversational", [True, False])
@pytest.mark.parametrize("kind", ["reward", "kwise"])
def test_the_end_is_read_where_it_pads_too(tmp_path, monkeypatch, kind, conversational):
    monkeypatch.setattr(reward_model, "BATCH", 4)  # texts of several lengths together
    trainer = trained(kind, tmp_path, pad_token=END)
    trainer.model.double()  # so that padding's other order of summing is below the bounds
    trainer.save_model()
    prompts = [row["prompt"] for row in rows_of("orm")]
    starts = [asked({"prompt": prompt}) for prompt in prompts]
    if not conversational:
        starts = prompts = [prompt[0]["content"] for prompt in prompts]
    given = {"rows": COMPLETIONS, "prompts": prompts}
    if conversational:
        found = in_grpo(str(tmp_path), **given)
    else:
        function = load_reward_model(str(tmp_path), build_tokenizer(), ARGS)
        texts, finished, _ = zip(*COMPLETIONS, strict=True)
        tokens = as_policy(texts, finished)["completion_ids"]
        found = function(prompts=prompts, completions=list(texts), completion_ids=tokens)
    for score, start, (text, finished, _) in zip(found, starts, COMPLETIONS, strict=True):
        with torch.no_grad():
            logits = outputs(trainer.model, ids(start + text + END * finished), [-1])
            other = outputs(trainer.model, ids(start + text + END * (not finished)), [-1])
        assert score == pytest.approx(float(logits), abs=2e-6)
        assert score != pytest.approx(float(other), abs=1e-3)
    # as transformers alone reads it, one text at a time
    alone = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype="auto")
    assert alone.config.pad_token_id is None
    with torch.no_grad():
        plain = alone(torch.tensor([ids(starts[0] + COMPLETIONS[0][0] + END)])).logits
    assert found[0] == pytest.approx(float(plain), abs=2e-6)


def test_a_model_that_was_not_trained_to_read_the_end_is_read_as_it_was_trained(tmp_path, capsys):
    trainer = build(
        "reward", "trl", rows=rows_of("reward"), output_dir=str(tmp_path), pad_token=END
    )
    trainer.save_model()
    trainer.model.eval()
    found = in_grpo(str(tmp_path))
    for n in (0, 1, 5, 6, 7):
        row = trainer.train_dataset[n]["chosen_ids"]
        with torch.no_grad():
            logits = outputs(trainer.model, row, [-2])  # the last token that is not padding
        assert found[n] == pytest.approx(float(logits), abs=2e-6)
    assert (
        "pads with its end token, so that it was not trained to read it" in capsys.readouterr().out
    )


@pytest.mark.parametrize(("kind", "aggregate"), [("reward", None), ("orm", "last")])
def test_what_grpo_really_hands_over(models, kind, aggregate):
    folder, trainer = models(kind)
    function = load_reward_model(folder, build_tokenizer(), ARGS, aggregate)
    seen = []

    def rewarded(**given):
        scores = function(**given)
        parts = (given[key] for key in ("prompts", "completions", "completion_ids"))
        seen.extend(zip(*parts, scores, strict=True))
        return scores

    policy = build_policy("grpo", rewards=[rewarded], reward_weights=[1.0], max_steps=1)
    policy.train()
    assert len(seen) == 8 and {given[-1] == EOS for _, _, given, _ in seen} == {True, False}
    for prompt, completion, given, score in seen:
        text = completion[0]["content"] + END * (given[-1] == EOS)
        whole = ids(asked({"prompt": prompt}) + text)
        with torch.no_grad():
            logits = outputs(trainer.model, whole, [len(whole) - 1])
        assert score == pytest.approx(by_hand(kind, logits, aggregate), abs=1e-5)


@pytest.mark.parametrize(
    ("recipe", "kind", "aggregate"), [("grpo", "prm", "product"), ("ppo", "orm", "last")]
)
def test_a_recipe_on_a_trained_model(run, refused, models, tmp_path, recipe, kind, aggregate):
    small = ["--dataset.size", 40, "--dataset.eval_size", 8, "--max_steps", 1]
    small += ["--per_device_train_batch_size", 8, "--eval_strategy", "no"]
    small += ["--reward_funcs", "[]", "--reward_weights", 1.0, "--reward_model"]
    folder, _ = run(recipe, recipe, *small, models(kind)[0], "--reward_aggregate", aggregate)
    logged = json.loads((folder / "log.json").read_text())
    means = [row["rewards/reward_model/mean"] for row in logged if "reward" in row]
    assert means and all(0 < mean < 1 for mean in means)
    folder = copied(models, kind, tmp_path)
    edited(folder, lambda content: content.update(normalizer={"type": "Lowercase"}))
    sentence = refused(recipe, recipe, *small, folder, folder=tmp_path / "refused")
    assert sentence.startswith("error: reward_model: the tokenizer of")


# --- a template whose end of the turn is not the end-of-sequence token


def test_a_cut_off_answer_has_no_end_of_the_turn_whatever_it_is(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] + ('<|end|>' if m['role'] == 'user' else '|') }}"
        "{% endfor %}"
    )
    row = rows_of("reward")[0]
    trainer = build("reward", rows=[row], output_dir=str(tmp_path), tokenizer=tokenizer)
    trainer.save_model()
    trainer.model.eval()
    prompt = [row["prompt"]] * 2
    found = in_grpo(str(tmp_path), rows=[("ab", False, None), ("cd", True, None)], prompts=prompt)
    for text, score in zip(("ab", "cd|"), found, strict=True):
        with torch.no_grad():
            logits = outputs(trainer.model, ids(f"sun{END}{text}"), [-1])
        assert score == pytest.approx(float(logits), abs=2e-6)


# --- adapters, resuming


def adapter(**config):
    return LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **config)


@pytest.mark.parametrize("kind", ["reward", "orm", "prm"])
def test_lora(tmp_path, kind):
    trainer = trained(kind, tmp_path, peft=adapter(), learning_rate=3e-2)
    told = json.loads((tmp_path / "adapter_config.json").read_text())
    assert told["task_type"] == ("SEQ_CLS" if kind == "reward" else "TOKEN_CLS")
    saved = load_file(tmp_path / "adapter_model.safetensors")
    heads = {key.rpartition(".")[2] for key in saved if "score" in key}
    assert heads == ({"weight", "bias"} if kind == "prm" else {"weight"})
    assert all(saved[key].any() for key in saved)
    found = in_grpo(str(tmp_path))
    aggregate = {"reward": None, "orm": "mean", "prm": "min"}[kind]
    for n, score in enumerate(found):
        logits = logits_in_training(trainer, kind, n)
        if logits is not None:
            assert score == pytest.approx(by_hand(kind, logits, aggregate), abs=1e-5)


def test_an_adapter_without_its_head_is_refused(tmp_path):
    trained("orm", tmp_path, peft=adapter())
    from safetensors.torch import save_file

    file = tmp_path / "adapter_model.safetensors"
    kept = {k: v for k, v in load_file(file).items() if "score" not in k}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks .*score.*; name a trained one"):
        load_reward_model(str(tmp_path), build_tokenizer(), ARGS)


@pytest.mark.parametrize(
    ("name", "which", "peft"),
    [
        ("reward", "chapter", False),
        ("orm", "code", False),
        ("prm", "code", False),
        ("orm", "chapter", True),
    ],
)
def test_a_resumed_run_ends_like_one_that_never_stopped(tmp_path, name, which, peft):
    def make():
        return build(
            name,
            which,
            output_dir=str(tmp_path),
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
            learning_rate=1e-3,
            train_sampling_strategy="random",
            gradient_accumulation_steps=2,
            peft=adapter() if peft else None,
        )

    def weights(trainer):
        return {k: v.detach().clone() for k, v in trainer.model.named_parameters()}

    whole = make()
    whole.train()
    expected = weights(whole)
    resumed = make()
    begun = weights(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    found = weights(resumed)
    assert all(torch.equal(found[k], expected[k]) for k in expected)
    assert any((found[k] - begun[k]).abs().max() > 1e-4 for k in expected if "score" in k)


# --- input that cannot work


def refused(match, function, *args, **kwargs):
    with pytest.raises(InputError, match=match) as stop:
        function(*args, **kwargs)
    sentence = str(stop.value)
    assert sentence.startswith("reward_") and "\n" not in sentence and ".." not in sentence


def test_an_aggregate_that_does_not_exist(models):
    for kind, known in (("orm", "mean or last"), ("prm", "min or last or product")):
        folder, _ = models(kind)
        refused(f"'median' is not a score of .* write {known}", in_grpo, folder, "median")
    refused("'last' is not a score of .* kind reward", in_grpo, models("reward")[0], "last")


GOOD = {
    "algorithm": "prm",
    "formulation": "code",
    "num_labels": 3,
    "step_separator": "\n",
    "step_split": "x",
}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "null",
        '"prm"',
        {**GOOD, "num_labels": 1},
        {**GOOD, "algorithm": "ppo"},
        {**GOOD, "algorithm": None},
        {**GOOD, "formulation": "trl"},
        {**GOOD, "step_separator": None},
        {**GOOD, "step_split": "("},
        {**GOOD, "step_split": 3},
        {**GOOD, "color": "red"},
        {k: v for k, v in GOOD.items() if k != "num_labels"},
    ],
)
def test_a_damaged_description(tmp_path, content):
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "reward_model.json").write_text(text)
    refused(r"reward_model: .*reward_model\.json", in_grpo, str(tmp_path))


def copied(models, kind, tmp_path, **told):
    """Return a copy of a trained model, its description changed."""
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(models(kind)[0], folder)
    if told:
        file = folder / "reward_model.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **told}))
    return folder


def test_a_process_model_that_cannot_cut_completions(models, tmp_path):
    folder = copied(models, "prm", tmp_path, step_split=None)
    with pytest.raises(InputError, match=r"reward_model\.json describes no .*step_split None"):
        in_grpo(str(folder))


def test_a_head_that_does_not_fit(models, tmp_path):
    folder = copied(models, "prm", tmp_path, formulation="chapter", num_labels=1)
    refused("num_labels 3; name a model with num_labels 1", in_grpo, str(folder))
    AutoModelForTokenClassification.from_pretrained(checkpoint(), num_labels=2).save_pretrained(
        tmp_path / "two"
    )
    build_tokenizer().save_pretrained(tmp_path / "two")
    (tmp_path / "two" / "reward_model.json").write_text(json.dumps(GOOD))
    refused("num_labels 2; name a model with num_labels 3", in_grpo, str(tmp_path / "two"))
    AutoModelForSequenceClassification.from_pretrained(checkpoint(), num_labels=2).save_pretrained(
        tmp_path / "pair"
    )
    build_tokenizer().save_pretrained(tmp_path / "pair")
    refused("num_labels 2; name a model with num_labels 1", in_grpo, str(tmp_path / "pair"))


def edited(folder, change):
    file = Path(folder) / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize("kind", ["reward", "orm", "prm"])
def test_a_reward_model_without_a_chat_template(models, tmp_path, kind):
    folder = copied(models, kind, tmp_path)
    (folder / "chat_template.jinja").unlink()
    refused(r"has no chat template; add that of its training", in_grpo, str(folder))


def test_a_tokenizer_that_changes_the_text(models, tmp_path):
    folder = copied(models, "orm", tmp_path)
    edited(folder, lambda content: content.update(normalizer={"type": "Lowercase"}))
    refused("cannot write 'ABCDEFGHIJKLMNOPQRSTUVWXYZ', which the", in_grpo, str(folder))


@pytest.mark.parametrize("unknown", ["token", "none"])
def test_a_tokenizer_that_does_not_know_a_character(models, tmp_path, unknown):
    def forget(content):
        content["model"]["vocab"].pop("_")
        if unknown == "none":
            content["model"]["unk_token"] = None

    folder = edited(copied(models, "orm", tmp_path), forget)
    refused("cannot write '_', which the policy's can", in_grpo, folder)


def test_a_question_that_the_tokenizer_cannot_write(models):
    prompts = [message("user", "sn"), message("user", "sñ")]
    says = "reads the policy's 'sñ' as 's\ufffd'"
    refused(re.escape(says), in_grpo, models("orm")[0], None, COMPLETIONS[:2], prompts)


def test_a_tokenizer_of_a_larger_model(models, tmp_path):
    folder = copied(models, "orm", tmp_path)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([f"<{n}>" for n in range(20)])
    tokenizer.save_pretrained(folder)
    refused("has 133 tokens and the model 120", in_grpo, str(folder))
