"""`rlhf-trl evaluate`: the numbers of the run itself, their errors, one table, bad names."""

import json
import math
import os
import random
import re
import statistics
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from named_models import make_adapter, make_reward_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_trl import cli
from rlhf_trl.book.kl import exact
from rlhf_trl.data.files import Examples
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.answer_kl import kl_of_answers
from rlhf_trl.evaluation.report import next_steps
from rlhf_trl.evaluation.side_by_side import compare, mean_and_error, table
from rlhf_trl.rewards.from_model import load_reward_model
from rlhf_trl.run.config import read_config
from rlhf_trl.run.folders import with_origin
from rlhf_trl.run.named import Named, load_run, named, with_checkpoints
from rlhf_trl.run.train import read
from rlhf_trl.tiny import checkpoint_path

RUN = ["--dataset.size", 40, "--dataset.eval_size", 24, "--per_device_eval_batch_size", 16]
RUN += ["--num_generations", 4, "--per_device_train_batch_size", 8, "--learning_rate", "5e-4"]
RUN += ["--max_steps", 4, "--eval_steps", 2, "--save_strategy", "steps", "--save_steps", 2]
RUN += ["--seed", 3, "--reward_weights", "1.0", "0.5", "0.3", "0.1"]
RUN += ["--reward_funcs", "exact_match", "format", "named_models.brief"]


# --- errors --------------------------------------------------------------------------------------


def test_the_error_of_single_values_is_the_usual_one():
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    mean, error = mean_and_error(values, [0, 1, 2, 3, 4])
    assert mean == 0.6
    assert error == pytest.approx(statistics.stdev(values) / math.sqrt(5), rel=1e-12)


def test_the_error_by_prompt_is_that_of_a_bootstrap_of_prompts():
    rng = random.Random(0)
    values, groups = [], []
    for group in range(120):
        level = rng.gauss(0, 1)
        for _ in range(rng.randint(1, 5)):
            values.append(level + rng.gauss(0, 0.5))
            groups.append(group)
    by_group = [[v for v, g in zip(values, groups, strict=True) if g == n] for n in range(120)]
    means = []
    for _ in range(3000):
        drawn = [value for _ in range(120) for value in rng.choice(by_group)]
        means.append(sum(drawn) / len(drawn))
    mean, error = mean_and_error(values, groups)
    assert mean == sum(values) / len(values)
    assert error == pytest.approx(statistics.stdev(means), rel=0.06)
    # who takes values of one prompt for independent ones believes too much
    assert error > 1.3 * mean_and_error(values, list(range(len(values))))[1]


def test_what_does_not_apply_does_not_count():
    assert mean_and_error([1.0, None, 0.0], [0, 1, 2]) == (0.5, 0.5)
    assert mean_and_error([None, 1.0, 1.0], [0, 1, 1]) == (1.0, None)  # a single prompt
    assert mean_and_error([None], [0]) == (None, None)


def test_differences_are_paired():
    scores = {
        "one": {"right": [0.0, 1.0, 0.0, None], "length": [3, 3, 3, 3]},
        "two": {"right": [1.0, 1.0, 1.0, 1.0], "reward": [None] * 4},
    }
    found = compare(scores, [0, 1, 2, 3])
    told = found["two"]["eval_right"]
    assert told["value"] == 1.0 and told["error"] == 0.0
    assert told["difference"] == 2 / 3
    # 1/3, -2/3, 1/3: sum of squares 2/3, times 3/2, root, over 3
    assert told["difference_error"] == pytest.approx(1 / 3, rel=1e-12)
    assert "eval_reward" not in found["two"]
    lines = table(found).splitlines()
    assert lines[1].split() == [
        *["right", "0.333", "±", "0.333", "1.000", "±", "0.000", "(+0.667", "±", "0.333)"]
    ]
    assert lines[2].split() == ["length", "3.000", "±", "0.000", "-"]


def test_all_samples_count_and_are_clustered_by_their_prompt():
    rows = [[1.0, 0.0], [1.0, None], [None, None]]
    scores = {"one": {"x": [0.0, 0.0, 0.0]}, "two": {"x": [0.5, 1.0, None]}}
    (measured,) = compare(scores, [0, 1, 2], samples={"two": {"x": rows}})["two"].values()
    assert measured["value"] == 2 / 3  # of three values
    # residuals of the two prompts that have values: 1/3 - 2/3 and 1/3
    assert measured["error"] == pytest.approx(math.sqrt(2 * 2 / 9) / 3, rel=1e-12)
    assert measured["deviation"] == pytest.approx(statistics.stdev([1, 0, 1]), rel=1e-12)
    assert measured["difference"] == 0.75  # of the rows' means, where the score applies to both
    assert compare({"one": {"x": [2.0]}}, [0])["one"]["eval_x"]["deviation"] is None


def test_no_error_is_shown_where_it_is_unknown():
    found = compare({"one": {"right": [0.0, 1.0]}, "two": {"right": [1.0, 1.0]}}, [0, 0])
    assert [told["eval_right"]["error"] for told in found.values()] == [None, None]
    assert table(found).splitlines()[1].split() == ["right", "0.500", "1.000", "(+0.500)"]


def test_weighted_means_are_those_of_all_tokens_and_their_errors_those_of_a_ratio():
    # three answers of 1, 2 and 5 tokens, two of them to one prompt
    values, groups, weights = [0.4, 0.7, 0.2], [0, 0, 1], [1, 2, 5]
    mean, error = mean_and_error(values, groups, weights)
    assert mean == pytest.approx((0.4 + 1.4 + 1.0) / 8, rel=1e-12)
    # residuals of prompts: 0.4 + 1.4 - 3 * 0.35 = 0.75 and 1.0 - 5 * 0.35 = -0.75
    assert error == pytest.approx(math.sqrt(2 * 2 * 0.75**2) / 8, rel=1e-12)
    scores = {"one": {"loss": values}, "two": {"loss": [0.3, 0.7, 0.2]}}
    own = {"one": {"loss": weights}, "two": {"loss": weights}}
    told = compare(scores, groups, own)["two"]["eval_loss"]
    assert told["difference"] == pytest.approx(-0.1 / 8, rel=1e-12)
    # another tokenizer, other weights: the two means have no difference by row
    told = compare(scores, groups, own | {"two": {"loss": [1, 2, 4]}})["two"]["eval_loss"]
    assert told["value"] == pytest.approx((0.3 + 1.4 + 0.8) / 7, rel=1e-12)
    assert told["difference"] is None


def test_a_table_of_three_models_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    right = {"tiny": [0.0, 0.0], "outputs/one": [1.0, 0.0], "outputs/two": [1.0, 1.0]}
    found = compare({name: {"exact_match": values} for name, values in right.items()}, [0, 1])
    said = table(found)
    assert max(map(len, said.splitlines())) <= 80
    assert said.splitlines()[:3] == [
        "             tiny           outputs/one       outputs/two",
        "exact match  0.000 ± 0.000  0.500 ± 0.500     1.000 ± 0.000",
        "                            (+0.500 ± 0.500)  (+1.000 ± 0.000)",
    ]


def test_the_exact_kl_by_hand():
    logits = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    other = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert exact(logits, other).tolist() == pytest.approx([expected, 0.0], abs=1e-7)


# --- evaluate ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "adapter": make_adapter(folder / "adapter"),
        "reward": make_reward_model(folder / "reward"),
        "empty": (folder / "empty").mkdir() or folder / "empty",
    }


@pytest.fixture(scope="module")
def cache():
    return {}


@pytest.fixture
def trained(run, cache, models, tmp_path_factory):
    """The folder of a small run whose rewards are three functions and a reward model."""
    if not cache:
        folder = tmp_path_factory.mktemp("run") / "out"
        cache["run"] = run("grpo", "grpo", *RUN, "--reward_model", models["reward"], folder=folder)
    return cache["run"][0]


def test_a_run_ends_with_what_to_do_next_and_that_works(trained, cache, evaluate, monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = cache["run"][1].splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("model, learning curve"))
    told = dict(re.split(r":\s+", line.strip(), maxsplit=1) for line in lines[start + 1 : -1])
    shown = os.path.relpath(trained)
    assert [*told] == ["talk to it", "evaluate it", "in Python", "train on"]
    assert told["talk to it"] == f"rlhf-trl chat {shown}"
    assert told["evaluate it"] == f"rlhf-trl evaluate tiny {shown}"
    longer = "the same command with --resume_from_checkpoint auto, and --max_steps 8 in place of 4"
    assert told["train on"] == f"{longer}; the learning rate then follows the longer schedule"
    said = []
    exec(told["in Python"], {"print": said.append})
    last = json.loads((trained / "evaluations" / "step-000004.json").read_text())["answers"][0]
    assert said[0][0]["generated_text"][-1] == message(last["greedy"])


@pytest.mark.parametrize("recipe", ["sft", "dpo"])
def test_a_run_on_texts_ends_with_a_text_to_answer(recipe, run, tmp_path, monkeypatch):
    row = {"prompt": "ab=", "completion": "ba", "chosen": "ba", "rejected": "ab"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    words = ["--dataset.path", tmp_path / "rows.jsonl", "--dataset.eval_size", "null"]
    words += ["--model_name_or_path", "tiny", "--use_cpu", "--bf16", "false", "--max_steps", 1]
    words += ["--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 1]
    words += ["--eval_strategy", "no", "--save_strategy", "no"]
    _, out = run(recipe, ROOT / "configs" / "own" / recipe, *words)
    monkeypatch.chdir(ROOT)
    (line,) = [line for line in out.splitlines() if "in Python:" in line]
    said = []
    exec(line.split(":", 1)[1].strip(), {"print": said.append})
    assert line.endswith("print(answer('ab='))")
    assert said[0][0]["generated_text"].startswith("ab=")


def test_what_a_run_says_to_type_works_when_it_is_pasted(tmp_path, monkeypatch):
    """Paths are quoted, and the command is one that is reached from here."""
    for kind in (".venv/bin", "elsewhere/bin"):
        (tmp_path / kind).mkdir(parents=True)
        for name in ("python", "rlhf-trl"):
            (tmp_path / kind / name).touch(0o755)
    (tmp_path / "outputs" / "my grpo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def commands(python, path):
        monkeypatch.setattr(sys, "executable", str(python))
        monkeypatch.setenv("PATH", str(path))
        lines = next_steps("outputs/my grpo", "my model", 5, "Why?", adapter=True).splitlines()
        return {line.split(":")[0].strip(): line.partition(": ")[2].strip() for line in lines}

    mine = tmp_path / ".venv" / "bin" / "python"
    active = commands(mine, mine.parent)
    assert active["talk to it"] == "rlhf-trl chat 'outputs/my grpo'"
    assert active["evaluate it"] == "rlhf-trl evaluate 'my model' 'outputs/my grpo'"
    assert active["merge it"] == "rlhf-trl merge 'outputs/my grpo'"
    assert "pipeline('text-generation', 'outputs/my grpo/model', " in active["in Python"]
    for path in ("/usr/bin", tmp_path / "elsewhere" / "bin"):  # none, or that of another one
        assert commands(mine, path)["talk to it"].split()[0] == ".venv/bin/rlhf-trl"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert commands(mine, "/usr/bin")["talk to it"].startswith(f"{mine.parent}/rlhf-trl chat ")
    monkeypatch.chdir(tmp_path)
    mine.with_name("rlhf-trl").unlink()
    assert commands(mine, "/usr/bin")["talk to it"].startswith(".venv/bin/python -m rlhf_trl.cli ")


def test_a_teacher_is_told_with_the_run_that_left_it(tmp_path):
    model = tmp_path / "grpo" / "model"
    assert with_origin("org/model") == "org/model" and with_origin(str(model)) == str(model)
    model.mkdir(parents=True)
    summary = {"name": "GRPO (chapter)", "model_step": 100, "seed": 3}
    model.with_name("summary.json").write_text(json.dumps(summary))
    assert with_origin(str(model)) == f"{model} (GRPO (chapter), 100 steps, seed 3)"


def test_prompts_that_are_texts_are_said_to_get_no_template(capsys):
    args = SimpleNamespace(process_index=0)
    for prompt in ("1 + 1", [{"role": "user", "content": "1 + 1"}]):
        read(args, lambda rows: Examples(rows, None, None, {"a tie": 2}), [{"prompt": prompt}])
    told = capsys.readouterr().out.splitlines()
    assert told.pop(1) == "prompts are texts: no chat template is applied (messages get it)"
    assert told == ["left out 2 rows: a tie"] * 2


def test_what_can_be_done_with_an_adapter_and_a_reward_model(tmp_path):
    adapter = next_steps("out", "tiny", 5, "Why?", adapter=True)
    assert "rlhf-trl merge out\n" in adapter and "print(answer('Why?'))" in adapter
    assert adapter.endswith("possible after a run with --save_strategy steps")
    (tmp_path / "scores.jsonl").touch()
    judge = next_steps(str(tmp_path), "tiny", 5, None, adapter=False)
    assert f"--reward_model {tmp_path}/model\n" in judge and "chat" not in judge
    assert f"rlhf-trl best-of-n {tmp_path}\n" in judge


@pytest.fixture
def evaluate(tmp_path, capfd, monkeypatch):
    def evaluate(*words):
        monkeypatch.chdir(tmp_path)
        capfd.readouterr()
        cli.main(["evaluate", *map(str, words)])
        return capfd.readouterr().out

    return evaluate


def test_start_checkpoint_and_model_get_the_numbers_of_the_run_bit_for_bit(trained, evaluate):
    told = json.loads(evaluate("tiny", trained / "checkpoint-2", trained, "--json"))
    assert (told["held_out"], told["config"]) == (24, str(trained / "config.yaml"))
    for step, numbers in zip((0, 2, 4), told["models"].values(), strict=True):
        record = json.loads((trained / "evaluations" / f"step-{step:06d}.json").read_text())
        assert {key: each["value"] for key, each in numbers.items()} == record["metrics"]
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["after"] == {k: v["value"] for k, v in told["models"][str(trained)].items()}
    assert {"eval_reward_model", "eval_brief", "eval_sampled_reward", "eval_gym_score"} <= summary[
        "after"
    ].keys()
    assert summary["before"]["eval_reward"] != summary["after"]["eval_reward"]


def test_a_run_an_adapter_and_a_reward_model_make_one_table(
    trained, models, evaluate, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "400")  # their names are long
    words = [trained, models["adapter"], "--reward_model", models["reward"]]
    out = evaluate(*words, "--reference", "tiny", "--dataset.eval_size", 6)
    lines = out.splitlines()
    assert lines[0] == f"6 held-out prompts of {trained / 'config.yaml'}"
    assert lines[2].split() == [str(trained), str(models["adapter"])]
    rows = {line.split("  ")[0]: line for line in lines[3:]}
    assert rows["reward model"].split()[2:] == rows["scored by reward"].split()[3:]
    assert rows["sampled kl"].count("±") == 3
    assert lines[-1] == "all answers, side by side, are in outputs/answers-1.jsonl"
    answers = [json.loads(x) for x in (tmp_path / "outputs/answers-1.jsonl").open()]
    assert len(answers) == 6
    last = json.loads((trained / "evaluations" / "step-000004.json").read_text())["answers"]
    found = [row[str(trained)]["greedy"] for row in answers]
    assert found == [each["greedy"] for each in last[:6]]
    # what a line says can be checked: the score, and the KL by other means
    row, said = answers[0], answers[0][str(models["adapter"])]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
    args = type("Args", (), {"device": "cpu"})()
    score = load_reward_model(str(models["reward"]), tokenizer, args)
    ended = said["scores"]["sampled_cut_off"] is False
    given = {"prompts": [row["prompt"]], "completions": [[message(said["sampled"])]]}
    given |= {"completion_ids": [[0]], "finished": [ended]}
    assert score(**given)[0] == pytest.approx(said["scores"]["sampled_scored_by_reward"], abs=1e-5)
    ids = tokenizer.apply_chat_template(
        row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    ids, start = ids + tokenizer.encode(said["sampled"]), len(ids)
    ids += [tokenizer.eos_token_id] * ended
    assert len(ids) - start == said["scores"]["sampled_length"]
    with torch.no_grad():
        p, q = (
            AutoModelForCausalLM.from_pretrained(name)(torch.tensor([ids])).logits[0].softmax(-1)
            for name in (models["adapter"], checkpoint_path())
        )
    kl = sum((p[t] * (p[t] / q[t]).log()).sum().item() for t in range(start - 1, len(ids) - 1))
    assert said["scores"]["sampled_kl"] == pytest.approx(kl, rel=1e-4)


def test_several_samples_of_each_prompt(trained, models, evaluate, tmp_path):
    words = [trained, "--dataset.eval_size", 8, "--samples", 3]
    words += ["--reference", "tiny", "--reward_model", models["reward"]]
    told = json.loads(evaluate(*words, "--answers", "both.jsonl", "--json"))
    assert (told["samples"], told["reference"], told["held_out"]) == (3, "tiny", 8)
    rows = [json.loads(line)[str(trained)] for line in (tmp_path / "both.jsonl").open()]
    # the first one is the answer of the run's own evaluation
    record = json.loads((trained / "evaluations" / "step-000004.json").read_text())["answers"]
    assert [row["sampled"] for row in rows] != [row["greedy"] for row in rows]
    for row in rows:
        assert row["sampled"] == row["samples"][0]["text"]
        for sample in row["samples"]:
            assert sample["finished"] is (not sample["scores"]["cut_off"])
            assert sample["tokens"] == sample["scores"]["length"]
            right = f"<answer>{row['answer']}</answer>" in sample["text"]
            assert sample["scores"]["exact_match"] == right
    assert [row["question"] for row in rows] == [row["question"] for row in record[:8]]
    assert any(len({sample["text"] for sample in row["samples"]}) == 3 for row in rows)
    numbers = told["models"][str(trained)]
    for name in ("exact_match", "scored_by_reward", "kl", "kl_k1"):
        values = [[sample["scores"][name] for sample in row["samples"]] for row in rows]
        flat = [value for row in values for value in row]
        measured = numbers[f"eval_sampled_{name}"]
        assert measured["value"] == pytest.approx(statistics.mean(flat), abs=1e-12)
        assert measured["deviation"] == pytest.approx(statistics.stdev(flat), rel=1e-9)
        means = [statistics.mean(row) for row in values]
        error = statistics.stdev(means) / math.sqrt(len(means))  # the same for equal numbers
        assert measured["error"] == pytest.approx(error, rel=1e-9, abs=1e-12)
        in_table = [row["scores"][f"sampled_{name}"] for row in rows]
        assert in_table == pytest.approx(means)
    gaps = [s["scores"]["kl"] - s["scores"]["kl_k1"] for row in rows for s in row["samples"]]
    assert abs(statistics.mean(gaps)) < 3 * statistics.stdev(gaps) / math.sqrt(len(gaps))


def test_samples_depend_on_no_other_model_and_no_batch(trained, evaluate, tmp_path):
    def samples(name, *words):
        evaluate(*words, "--dataset.eval_size", 7, "--answers", name)
        lines = [json.loads(line) for line in (tmp_path / name).open()]
        return [[sample["text"] for sample in line["tiny"]["samples"]] for line in lines]

    config = trained / "config.yaml"
    alone = samples("alone.jsonl", "tiny", "--config", config, "--samples", 3)
    samples("again.jsonl", "tiny", "--config", config, "--samples", 3)
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    assert samples("two.jsonl", trained, "tiny", "--samples", 3) == alone
    words = ["--config", config, "--samples", 4, "--per_device_eval_batch_size", 2]
    in_small_batches = samples("small.jsonl", "tiny", *words)
    for row, small in zip(alone, in_small_batches, strict=True):
        assert row[1:] == small[1:3]  # the first is drawn as in the run, batch by batch
    other_seed = samples("seed.jsonl", "tiny", "--config", config, "--samples", 3, "--seed", 4)
    assert other_seed != alone


def test_checkpoints_by_a_pattern_and_a_page(trained, evaluate, tmp_path):
    words = ["--markdown", "page.md", "--dataset.eval_size", 4, "--max_completion_length", 6]
    out = evaluate(f"{trained}/checkpoint-*", *words)
    assert out.endswith("are in outputs/answers-1.jsonl, some of them in page.md\n")
    text = (tmp_path / "page.md").read_text()
    assert text.splitlines()[2] == f"|  | {trained}/checkpoint-2 | {trained}/checkpoint-4 |"
    assert f"**{trained}/checkpoint-4**, greedily, cut off at the length limit:\n" in text
    assert "## Best and worst sampled answers by reward\n" in text


def with_logits(folder, extra, scale):
    """The embedded model with `extra` more logits; those beyond its vocabulary are like an e's."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
    model.resize_token_embeddings(model.config.vocab_size + extra, mean_resizing=False)
    letter = model.lm_head.weight.data[tokenizer.convert_tokens_to_ids("e")]
    model.lm_head.weight.data[len(tokenizer) :] = scale * letter
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_kl_is_over_all_that_can_be_sampled(tmp_path):
    words = ["--use_cpu", "--dataset.size", "4", "--dataset.eval_size", "3"]
    loaded, data = load_run(str(ROOT / "configs" / "tiny" / "grpo.yaml"), words)
    paths = [with_logits(tmp_path / "one", 0, 0.9), with_logits(tmp_path / "more", 7, 0.5)]
    one, more = (named(path).load(loaded, data.conversational) for path in paths)
    tokenizer, rows = one.processing_class, data.tasks.held_out
    one.held_out = more.held_out = rows
    said = one.complete(rows)[1]
    expected = []
    for row, answer in zip(rows, said, strict=True):
        asked = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        ids = torch.tensor([[*asked, *answer.ids]])
        with torch.no_grad():
            p, q = (
                AutoModelForCausalLM.from_pretrained(path)(ids).logits[0].double().softmax(-1)
                for path in paths
            )
        assert p.shape[1] == 120 and q.shape[1] == 127 and len(tokenizer) == 113
        p, q = p[len(asked) - 1 : -1], q[len(asked) - 1 : -1, :120]  # p has no more than that
        assert p[:, 113:].sum() > 0.01  # that is sampled now and then
        expected.append(float((p * (p / q).log()).sum()))
    assert kl_of_answers(one, more, said)["kl"] == pytest.approx(expected, rel=1e-4)
    with pytest.raises(InputError, match=r"one has 120 logits and .*more 127, .*KL is infinite"):
        kl_of_answers(more, one, said)


def message(text):
    return {"role": "assistant", "content": text}


def test_a_file_of_answers_is_not_replaced_and_numbered_ones_go_on(evaluate, tmp_path):
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "answers-4.jsonl").touch()
    out = evaluate("tiny", "--dataset.eval_size", 2, "--dataset.size", 2)
    assert out.endswith("outputs/answers-5.jsonl\n")
    with pytest.raises(SystemExit, match=r"answers-4.jsonl exists; name"):
        evaluate("tiny", "--answers", tmp_path / "outputs" / "answers-4.jsonl")


def test_prompts_of_ones_own_that_have_no_scores(evaluate, own_model, tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"red or {c}?"}, message(c)]} for c in "abcd"]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "sft.yaml"
    lines = ["output_dir: out", "max_completion_length: 5", f"model_name_or_path: {own_model}"]
    lines += ["dataset:", "  source: path", f"  path: {file}"]
    config.write_text("\n".join(lines) + "\n")
    words = [own_model, "--config", config, "--json"]
    with pytest.raises(SystemExit, match=r"holds no prompts out; name some .*--dataset\.eval_path"):
        evaluate(*words)
    told = json.loads(evaluate(*words, "--dataset.eval_size", 2))["models"][str(own_model)]
    assert [*told] == [
        *("eval_loss", "eval_mean_token_accuracy"),
        *(f"eval_{n}" for n in ("length", "cut_off", "sampled_length", "sampled_cut_off")),
    ]
    assert told["eval_length"]["value"] <= 5


# --- names ---------------------------------------------------------------------------------------


def refused(word, **options):
    with pytest.raises(InputError) as stop:
        named(str(word), **options)
    assert str(stop.value).count(". ") == 0 and str(stop.value).endswith(".")
    return str(stop.value)


def test_what_names_no_policy_is_refused_in_one_sentence(trained, models, tmp_path):
    assert refused(tmp_path / "none").startswith(f"there is no folder {tmp_path}/none; name a run")
    assert refused("outputs/none/there").startswith("there is no folder outputs/none/there")
    assert refused(models["empty"]).startswith(f"{models['empty']} is empty; name a run")
    assert refused(trained / "summary.json").endswith(
        "is a file; name the folder of a run or of a model."
    )
    assert "evaluations holds no model; name a run" in refused(trained / "evaluations")
    assert "is a reward model, which writes no answers; name a policy" in refused(models["reward"])
    assert named(str(models["reward"]), reward_model=True).path == str(models["reward"])
    going = tmp_path / "going"
    going.mkdir()
    (going / "config.yaml").write_text("algorithm: grpo\n")
    assert refused(going).endswith("is a run that has not ended, so it holds no model; let it end.")
    (going / "checkpoint-5").mkdir()
    assert refused(going).endswith(f"name {going}/checkpoint-5, its newest checkpoint.")
    file = make_adapter(tmp_path / "lost", scale=0) / "adapter_config.json"
    told = json.loads(file.read_text()) | {"base_model_name_or_path": "/gone/base"}
    file.write_text(json.dumps(told))
    assert "is an adapter whose base model /gone/base is gone" in refused(tmp_path / "lost")
    assert named("someone/model") == ("someone/model", "someone/model", None)


def test_a_pattern_names_checkpoints_by_their_steps(tmp_path):
    for step in (5, 10, 100, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    steps = [5, 10, 20, 100]
    pattern = f"{tmp_path}/checkpoint-*"
    expanded = with_checkpoints(["tiny", pattern, "someone/model"])
    assert expanded == ["tiny", *(f"{tmp_path}/checkpoint-{n}" for n in steps), "someone/model"]
    assert with_checkpoints([f"{tmp_path}/checkpoint-1*"]) == [
        f"{tmp_path}/checkpoint-10",
        f"{tmp_path}/checkpoint-100",
    ]
    with pytest.raises(InputError, match=r"^no checkpoint fits .*/checkpoint-7\*; name .*\.$"):
        with_checkpoints([f"{tmp_path}/checkpoint-7*"])


def test_a_model_of_several_seeds_is_called_by_what_they_share():
    words = ["outputs/judge", "outputs/judge/seed-0", "outputs/judge/seed-11/model", "seed-1"]
    assert [Named(word, word).name for word in words] == ["judge", "judge", "judge", "seed-1"]
    assert Named("outputs/judge/checkpoint-5", "").name == "checkpoint-5"


def test_bad_calls_are_one_sentence(trained, models, evaluate, tmp_path):
    def no(*words):
        with pytest.raises(SystemExit) as stop:
            evaluate(*words)
        assert str(stop.value.code).startswith("error: ") and "\n" not in stop.value.code
        return stop.value.code

    assert "is of no run here" in no(models["adapter"])
    assert "a model is named twice (tiny, tiny)" in no("tiny", "tiny")
    assert no("tiny", "--samples", 0) == "error: --samples is 0; write 1 or more."
    assert "--markdown: " in no("tiny", "--markdown", trained / "summary.json")
    same = no("tiny", "--answers", "a.md", "--markdown", "./a.md")
    assert same == "error: --markdown: ./a.md is the file of --answers; name another."
    assert "someone/model' is neither a model folder here nor a hub model" in no(
        "someone/model", "--config", trained / "config.yaml"
    )
    config = ROOT / "configs" / "tiny" / "reward.yaml"
    assert "is for recipes/reward.py, which trains reward models" in no("tiny", "--config", config)
    strange = tmp_path / "config.yaml"
    strange.write_text("algorithm: gprro\n")
    assert "unknown algorithm 'gprro'" in no("tiny", "--config", strange)
    assert "dataset.eval_sice is not a known key" in no("tiny", "--dataset.eval_sice", 3)


def test_the_config_of_every_policy_can_be_evaluated_in_one_process(monkeypatch):
    for loader in ("load_prompts", "load_demonstrations", "load_preferences"):
        monkeypatch.setattr(f"rlhf_trl.run.examples.{loader}", lambda data, *_, **__: data)
    refused = []
    paths = [path for at in ("tiny", "book") for path in sorted((ROOT / "configs" / at).glob("*"))]
    for path in (p for p in paths if p.suffix == ".yaml" and p.stem != "base"):
        try:
            loaded, data = load_run(str(path))
        except InputError as error:
            assert "which trains reward models" in str(error), path
            refused.append(path.stem)
            continue
        given = read_config(path)
        assert data.path if data.source == "path" else data.specs[0].name, path
        size = given.get("per_device_eval_batch_size", 8)
        assert loaded.trl.per_device_eval_batch_size == size and loaded.trl.max_completion_length
    judges = ["kwise", "orm", "prm", "prm_sampled", "reward", "weak_reward", "orm", "prm", "reward"]
    assert refused == judges
