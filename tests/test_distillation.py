"""The distillation trainer: what it computes, what its teachers read, and how it goes on."""

import json
from copy import deepcopy

import distillation_cases
import pytest
import torch
from distillation_cases import ROWS, alone, build, teacher, unpadded
from policy_gradient_cases import END, checkpoint, drift, is_right
from transformers import AutoModelForCausalLM

from rlhf_trl import distillation_loss
from rlhf_trl.compare.measure import accumulate, batches, flat_gradient
from rlhf_trl.errors import InputError
from rlhf_trl.tiny.model import build_model
from rlhf_trl.tiny.tokenizer import build_tokenizer


def window_of(trainer):
    """Loss, gradient and micro-batches of one accumulation window, and a copy of the student."""
    drift(trainer.model, 0.05, 99)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint())
    plain.load_state_dict(trainer.model.state_dict())
    return (*accumulate(trainer, batches(trainer)), plain)


def filled(parts, width):
    """Stack (t, ...) tensors of unlike lengths."""
    return torch.stack([torch.cat([p, p.new_zeros(width - len(p), *p.shape[1:])]) for p in parts])


def reference(name, which, window, student, teachers, weights=None):
    """The public function on forwards of single texts; those of a prompt stand together."""
    own = "teacher_" if name == "sdpo" else ""
    texts = []
    for batch in window:
        completions = unpadded(batch["completion_ids"], batch["completion_mask"])
        prompts = unpadded(batch["prompt_ids"], batch["prompt_mask"])
        read = unpadded(batch[f"{own}prompt_ids"], batch[f"{own}prompt_mask"])
        texts += zip(prompts, completions, read, strict=True)
    texts.sort()
    width = max(len(completion) for _, completion, _ in texts)
    mask = filled([torch.ones(len(c)) for _, c, _ in texts], width)
    given = [filled([alone(student, p, c) for p, c, _ in texts], width)]
    with torch.no_grad():
        for each in teachers:
            given.append(filled([alone(each, r, c) for _, c, r in texts], width))
    if (name, which) == ("opd", "chapter"):
        ids = filled([torch.tensor(c) for _, c, _ in texts], width)
        given = [g.log_softmax(-1).gather(-1, ids[..., None])[..., 0] for g in given]
    kind = "logps" if given[0].dim() == 2 else "logits"
    shown = mask
    if name == "sdpo":  # who has read nothing more than the student teaches nothing
        shown = mask * torch.tensor([[float(p != r)] for p, _, r in texts])
    also = {kind: given[0], f"teacher_{kind}": torch.stack(given[1:]), "formulation": which}
    also |= {"teacher_weights": weights}
    if (name, which) != ("sdpo", "code"):
        return distillation_loss(name, mask=shown, **also)
    # the tokens of all completions of a prompt count; a prompt without demonstration gives 0
    groups = [
        distillation_loss(
            *(name,), mask=mask[n : n + 4], formulation=which,
            logits=given[0][n : n + 4], teacher_logits=given[1][n : n + 4],
        ) * (texts[n][0] != texts[n][2])
        for n in range(0, len(texts), 4)
    ]  # fmt: skip
    return sum(groups) / len(groups)


@pytest.mark.parametrize(("name", "which"), ROWS)
def test_the_trainer_computes_the_public_function_on_texts_alone(name, which):
    """Left padding of unequal prompts, shuffling and accumulation change nothing."""
    trainer = build(name, which, gradient_accumulation_steps=2)
    measured, window, plain = window_of(trainer)
    lengths = {int(row.sum()) for batch in window for row in batch["prompt_mask"]}
    assert len(lengths) > 1
    folder = teacher() if name == "opd" else checkpoint()
    teachers = [AutoModelForCausalLM.from_pretrained(folder)]
    loss = reference(name, which, window, plain, teachers)
    loss.backward()
    expected = flat_gradient(plain)
    assert float(expected.norm()) > 0.01
    if (name, which) != ("opd", "chapter"):  # whose value means nothing
        assert measured.loss == pytest.approx(loss.item(), rel=1e-5)
    assert float((measured.gradient - expected).norm() / expected.norm()) < 1e-5


def test_several_teachers_are_weighed():
    models = [teacher(), teacher(6)]
    trainer = build("opd", "trl", teacher_models=models, teacher_weights=[0.25, 0.75])
    measured, window, plain = window_of(trainer)
    teachers = [AutoModelForCausalLM.from_pretrained(folder) for folder in models]
    weights = torch.tensor([0.25, 0.75])
    loss = reference("opd", "trl", window, plain, teachers, weights)
    assert measured.loss == pytest.approx(loss.item(), rel=1e-5)


def test_a_text_alone_and_in_the_batch_have_the_same_logits():
    trainer = build("sdpo", "code", per_device_train_batch_size=16)
    _, (batch,), _ = window_of(trainer)
    (read,) = trainer._taught(trainer.model, batch)
    prompts = unpadded(batch["teacher_prompt_ids"], batch["teacher_prompt_mask"])
    completions = unpadded(batch["completion_ids"], batch["completion_mask"])
    assert len({len(p) for p in prompts}) > 2
    plain = AutoModelForCausalLM.from_pretrained(checkpoint())
    for row, prompt, completion in zip(read, prompts, completions, strict=True):
        found = row[: len(completion)]
        torch.testing.assert_close(found, alone(plain, prompt, completion), rtol=0, atol=1e-5)


@pytest.mark.parametrize("which", ["first", "random"])
def test_the_teacher_reads_a_right_completion_of_the_same_prompt(which):
    tokenizer, seen = build_tokenizer(), set()
    for seed in range(4 if which == "random" else 1):
        trainer = build("sdpo", "code", demonstration=which, seed=seed, shuffle_dataset=False)
        batch = trainer._generate_and_score_completions(
            [trainer.train_dataset[n // 4] for n in range(8)]
        )
        completions = unpadded(batch["completion_ids"], batch["completion_mask"])
        texts = [tokenizer.decode(c, skip_special_tokens=True) for c in completions]
        read = unpadded(batch["teacher_prompt_ids"], batch["teacher_prompt_mask"])
        prompts = unpadded(batch["prompt_ids"], batch["prompt_mask"])
        for group in range(2):
            rows = range(group * 4, group * 4 + 4)
            right = [texts[i] for i in rows if is_right(completions[i])]
            hints = set()
            for i in rows:
                question = tokenizer.decode(prompts[i])
                told = tokenizer.decode(read[i])
                if not right:
                    assert told == question and not batch["demonstrated"][i]
                    continue
                word = trainer.train_dataset[group]["word"]
                before, after = question.split(word)
                assert told.startswith(f"{before}{word}\n") and told.endswith(after)
                hints.add(told[len(before + word) + 1 : len(told) - len(after)])
                assert batch["demonstrated"][i]
            if right:
                assert len(hints) == 1 and hints <= set(right)
                assert which == "random" or hints == {right[0]}
                seen |= hints
            assert batch["prompt_tokens"][rows[0]] == sum(len(completions[i]) for i in rows)
    assert which == "first" or len(seen) > 2


# Four completions of a prompt, two of them the same; and what each reads, by which ones are right.
FOUR = [[10, END], [11, END], [10, END], [12, 13, END]]
READ_FIRST = {  # None: no demonstration
    "chapter": {(0, 1, 2): [1, 0, 1, 0], (0, 2): [None, 0, None, 0], (1,): [1, None, 1, 1]},
    "code": {(0, 1, 2): [0, 0, 0, 0], (0, 2): [0, 0, 0, 0], (1,): [1, 1, 1, 1]},
}
READ_FIRST["trl"] = READ_FIRST["code"]


@pytest.mark.parametrize("which", READ_FIRST)
def test_a_completion_reads_its_own_text_in_the_code_only(which, monkeypatch):
    tokenizer, table = build_tokenizer(), READ_FIRST[which]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in FOUR]

    def right(prompts, **_):
        return [float(n % 4 in list(table)[n // 4]) for n in range(len(prompts))]

    monkeypatch.setattr(distillation_cases, "right", right)
    own = {"demonstration": "first", "per_device_train_batch_size": 12}
    trainer = build("sdpo", which, answer=lambda prompt, index, call: FOUR[index], **own)
    trainer.model.train()
    rows = [trainer.train_dataset[n // 4] for n in range(12)]
    batch = trainer._generate_and_score_completions(rows)
    read = unpadded(batch["teacher_prompt_ids"], batch["teacher_prompt_mask"])
    places = [place for group in table.values() for place in group]
    for n, (place, row) in enumerate(zip(places, rows, strict=True)):
        word = row["word"] if place is None else f"{row['word']}\n{texts[place]}"
        asked = [{"role": "user", "content": word}]
        expected = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(read[n]) == expected, n
    assert batch["demonstrated"].tolist() == [place is not None for place in places]
    metrics = trainer._metrics["train"]
    assert metrics["teacher/demonstrated"] == [sum(p is not None for p in places) / 12]
    same = [p is not None and FOUR[p] == FOUR[n % 4] for n, p in enumerate(places)]
    assert metrics["teacher/own_demonstration"] == [sum(same) / 12]
    assert any(same) == (which != "chapter")


def test_a_random_demonstration_is_any_right_one_but_the_own_text():
    trainer, seen = build("sdpo"), set()
    texts = ["a", "b", "a", "c", "wrong"]
    for group in range(60):
        hints = trainer._demonstrations(group, texts, [True, True, True, True, False])
        seen |= set(zip(texts, hints, strict=True))
    others = {"a": "bc", "b": "ac", "c": "ab", "wrong": "abc"}
    assert seen == {(text, hint) for text, hints in others.items() for hint in hints}


def test_prompts_without_a_right_completion_are_replaced():
    trainer = build("sdpo", "code", dynamic_sampling_rounds=9, num_generations=2)
    trainer.model.train()
    batch = trainer._prepare_inputs(next(batches(trainer)))
    assert batch["demonstrated"].all()
    completions = unpadded(batch["completion_ids"], batch["completion_mask"])
    prompts = unpadded(batch["prompt_ids"], batch["prompt_mask"])
    right = {}
    for prompt, completion in zip(prompts, completions, strict=True):
        right.setdefault(tuple(prompt), []).append(is_right(completion))
    assert all(any(each) for each in right.values())
    assert any(all(each) for each in right.values())  # which has no contrast, and stays
    metrics = trainer._metrics["train"]
    assert metrics["dynamic_sampling/discarded_groups"][0] > 0
    assert metrics["teacher/demonstrated"] == [1.0]


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("which", ["live", "start", "ema"])
def test_which_version_teaches(which):
    rate = {"teacher_rate": 0.25} if which == "ema" else {}
    trainer = build(
        "sdpo", "code", teacher=which, max_steps=2, learning_rate=1e-2, optim="sgd", **rate
    )
    before = weights_of(trainer.model)
    found = []
    step = trainer.training_step

    def noted(*args):
        loss = step(*args)
        found.append(weights_of(trainer.model))
        return loss

    trainer.training_step = noted
    trainer.train()
    after = weights_of(trainer.model)
    assert any(not torch.equal(after[k], before[k]) for k in before)
    (own,) = trainer._teachers
    if which == "live":
        assert own is None
        return
    taught = weights_of(own)
    for key, start in before.items():
        if which == "start":
            assert torch.equal(taught[key], start)
        else:  # after the first step 3/4 start + 1/4 student, and once more
            first = 0.75 * start + 0.25 * found[1][key]
            torch.testing.assert_close(taught[key], 0.75 * first + 0.25 * after[key])


def test_a_teacher_does_not_follow_the_student_through_trls_forward():
    trainer = build("sdpo", "code")
    _, (batch,), _ = window_of(trainer)
    (before,) = trainer._taught(trainer.model, batch)
    drift(trainer.model, 0.5, 1)
    (after,) = trainer._taught(trainer.model, batch)
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("name", "config"), [("sdpo", {"teacher": "ema"}), ("sdpo", {}), ("opd", {})]
)
def test_a_resumed_run_ends_alike(name, config, tmp_path):
    def run(folder, **more):
        trainer = build(
            *(name, "chapter"), answer=None, output_dir=str(folder), max_steps=4,
            learning_rate=1e-3, **config, **more,
        )  # fmt: skip
        return trainer

    whole = run(tmp_path / "whole", save_strategy="steps", save_steps=2)
    whole.train()
    again = run(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for (key, one), (_, other) in zip(
        whole.model.named_parameters(), again.model.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), key


def test_a_teacher_that_reads_other_tokens_is_refused(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    model = build_model(0)
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match=r"teacher_models: .* is not the policy's .*'<extra>'"):
        build("opd", teacher_models=[str(tmp_path / "other")])
    larger = deepcopy(model)
    larger.resize_token_embeddings(200)
    larger.save_pretrained(tmp_path / "larger")
    with pytest.raises(InputError, match="has 200 tokens and the policy"):
        build("opd", teacher_models=[str(tmp_path / "larger")])
    with pytest.raises(InputError, match="teacher_models: 'nowhere/at/all' is neither a language"):
        build("opd", teacher_models=["nowhere/at/all"])


@pytest.mark.parametrize(
    ("name", "config", "sentence"),
    [
        ("opd", {"teacher_models": []}, "teacher_weights is None for 0 teacher_models"),
        ("opd", {"teacher_weights": [0.5]}, "write a weight for each of at least one, none below"),
        ("opd", {"teacher_models": None}, "opd (chapter) needs teacher_models"),
        ("opd", {"teacher": "live"}, "teacher is not read by opd (chapter)"),
        ("sdpo", {"teacher_models": ["tiny"]}, "teacher_models is not read by sdpo (chapter)"),
        ("sdpo", {"teacher": "old"}, "teacher is 'old'; write one of live, start, ema"),
        ("sdpo", {"demonstration": "last"}, "demonstration is 'last'; write one of random, first"),
        ("sdpo", {"teacher_rate": 0.0}, "teacher_rate is 0.0; write a number above 0, at most 1"),
        ("sdpo", {"demonstration_template": "x"}, "is 'x'; write {demonstration} in it"),
        ("sdpo", {"kl_top_k": 0}, "kl_top_k is 0; write 1 or more"),
        ("sdpo", {"correctness_reward": "wrong"}, "correctness_reward: 'wrong' is not among"),
    ],
)
def test_mistakes_are_one_sentence(name, config, sentence):
    with pytest.raises(InputError) as error:
        build(name, **config)
    assert sentence in str(error.value) and "\n" not in str(error.value)


SMALL = [
    *["--dataset.size", 16, "--dataset.eval_size", 8, "--max_steps", 2, "--num_generations", 4],
    *["--per_device_train_batch_size", 8, "--per_device_eval_batch_size", 8],
]


@pytest.mark.parametrize("which", ["chapter", "trl"])
def test_opd_from_a_config(run, which):
    words = ["--teacher_models", "tiny", "--formulation", which]
    folder, out = run("distill", "opd", *SMALL, *words)
    assert out.startswith(f"opd ({which}) on cpu")
    log = json.loads((folder / "log.json").read_text())
    kl = [each["teacher/kl"] for each in log if "teacher/kl" in each]
    # the teacher is the student's own start, so nothing is to be learned at first
    assert (abs(kl[0]) < 1e-6) if which == "chapter" else not kl
    assert (folder / "model").is_dir()


@pytest.mark.parametrize("teacher", ["live", "start", "ema"])
def test_sdpo_with_lora_from_a_config(run, teacher):
    words = ["--model_name_or_path", "tiny", "--teacher", teacher, "--use_peft", "--lora_r", 2]
    words += ["--lora_target_modules", "q_proj", "v_proj"]
    folder, _ = run("distill", "sdpo", *SMALL, *words)
    log = json.loads((folder / "log.json").read_text())
    assert [each for each in log if each.get("teacher/demonstrated", 0) > 0]
    assert (folder / "model" / "adapter_config.json").is_file()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Return the model that a config leaves, trained once."""
    trained = {}

    def start(run, recipe, config):
        if config not in trained:
            folder = tmp_path_factory.mktemp(config) / "out"
            run(recipe, config, folder=folder)
            trained[config] = folder / "model"
        return trained[config]

    return start


@pytest.mark.promise
@pytest.mark.parametrize("seed", range(3))
def test_opd_reaches_its_teacher_in_40_steps(run, start, seed):
    folder, _ = run(
        "distill", "opd", "--teacher_models", start(run, "grpo", "grpo"), "--seed", seed
    )
    after = json.loads((folder / "summary.json").read_text())["after"]
    assert after["eval_exact_match"] >= 0.97 and after["eval_sampled_exact_match"] >= 0.88


@pytest.mark.promise
@pytest.mark.parametrize("seed", range(3))
def test_sdpo_learns_from_right_siblings_and_not_from_any(run, start, seed, tmp_path):
    words = ["--model_name_or_path", start(run, "sft", "sft_hinted"), "--seed", seed]
    ends = []
    for also in ([], ["--correctness_reward", "format", "--max_steps", 20]):
        folder, _ = run("distill", "sdpo", *words, *also, folder=tmp_path / f"{len(also)}")
        ends.append(json.loads((folder / "summary.json").read_text()))
    before, after = (ends[0][when] for when in ("before", "after"))
    assert 0.3 < before["eval_exact_match"] < 0.5
    assert after["eval_exact_match"] >= 0.92 and after["eval_sampled_exact_match"] >= 0.74
    assert ends[1]["after"]["eval_exact_match"] <= 0.05
