"""The answers of models as Markdown: what it says, and that it says texts as they are."""

from rlhf_trl.evaluation.answers_markdown import as_markdown
from rlhf_trl.evaluation.side_by_side import compare


def sample(text, reward, finished=True, **scores):
    return {"text": text, "finished": finished, "tokens": 3, "scores": {"reward": reward, **scores}}


def line(number, samples, cut_off=False, greedy="greedily so"):
    answer = {"question": f"question {number}?", "answer": f"right {number}", "greedy": greedy}
    return answer | {"scores": {"cut_off": cut_off}, "samples": samples}


def page(lines):
    models = [model for model in lines[0] if model != "prompt"]
    scores = {
        model: {"reward": [line[model]["samples"][0]["scores"]["reward"] for line in lines]}
        for model in models
    }
    return as_markdown("12 prompts", compare(scores, range(len(lines))), "; a note", lines)


def test_the_table_has_deviations_and_a_legend():
    lines = [{"prompt": "?", "a": line(n, [sample("x", n)])} for n in (0.0, 1.0, 2.0)]
    text = page(lines).splitlines()
    assert text[:5] == ["# 12 prompts", "", "|  | a |", "| --- | --- |", text[4]]
    assert text[4] == "| reward | 1.000 ± 0.577, sd 1.000 |"
    assert text[6] == "±: standard error by prompt; sd: standard deviation; a note"


def test_the_best_and_the_worst_answers_are_told_with_their_rewards():
    lines = [
        {
            "prompt": "?",
            "a": line(n, [sample(f"a{n}", n / 10), sample(f"b{n}", -n / 10, finished=False)]),
            "b": line(n, [sample("same", None)]),
        }
        for n in range(12)
    ]
    text = page(lines)
    of_a = text[text.index("\n### a\n") : text.index("\n### b\n")]
    assert [part for part in of_a.split("\n\n") if part.startswith(("best", "worst"))] == [
        "best, reward 1.100:",
        "best, reward 1.000:",
        "best, reward 0.900:",
        "worst, reward -1.100, cut off at the length limit:",
        "worst, reward -1.000, cut off at the length limit:",
        "worst, reward -0.900, cut off at the length limit:",
    ]
    assert "    question 11?\n    -> a11\n" in of_a and "    -> b11\n" in of_a
    assert text.endswith("### b\n")  # to which the reward applied nowhere
    assert text.count("### Prompt") == 10  # the file of answers has the others


def test_the_reward_model_that_was_named_ranks_and_without_any_reward_nothing_does():
    graded = [sample("fair", 0.0, scored_by_judge=2.0), sample("good", 1.0, scored_by_judge=1.0)]
    text = page([{"prompt": "?", "a": line(1, graded)}])
    assert "by scored by judge\n" in text and text.index("-> fair") < text.index("-> good")
    unscored = {"text": "so", "finished": True, "tokens": 2, "scores": {"length": 2}}
    lines = [{"prompt": "?", "a": line(1, [unscored])}]
    text = as_markdown("1 prompt", compare({"a": {"length": [2]}}, [0]), "", lines)
    assert "Best and worst" not in text and "**a**, sampled:\n\n    so\n" in text


def test_what_markdown_would_change_is_told_as_it_is():
    answer = "<think></think>\n# 1 | *2*\n```\n\n  indented"
    text = page([{"prompt": "?", "a": line(1, [sample(answer, 1.0)], True, greedy=" \n")}])
    assert "    <think></think>\n    # 1 | *2*\n    ```\n    \n      indented\n" in text
    assert "**a**, greedily, cut off at the length limit:\n\n    (nothing)\n" in text
