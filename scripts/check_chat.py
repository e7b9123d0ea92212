"""Talk to two models on the page of `rlhf-trl chat --ui` in headless Chromium, and check it.

    python scripts/check_chat.py outputs/grpo tiny --reward_model outputs/reward

Asks held-out questions and compares: greedy answers and their scores with those of
`rlhf-trl evaluate`, all scores with those that transformers computes. Then it uses
the settings, and types what looks like HTML. (With `tiny_untrained`, which writes random text, one
sampled score was off by .39; why is not known.)
Needs `scripts/setup.sh chat`, `pip install playwright` and a Chromium (`apt-get install chromium`);
no part of the tests.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import Page, sync_playwright
from transformers import AutoModelForSequenceClassification, AutoTokenizer

BELOW = re.compile(r"(?s)(.*)\n\((greedy|sampled), score (-?[\d.]+)\)")
CLOSE = 1e-4


class Judge:
    """The reward model, asked without this project."""

    def __init__(self, run: Path):
        self.tokenizer = AutoTokenizer.from_pretrained(run / "model")
        self.model = AutoModelForSequenceClassification.from_pretrained(run / "model").eval()

    def scores(self, question: str, answer: str) -> list[float]:
        """Return the score of an answer that ended, and of one that was cut off."""
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        whole = self.tokenizer.apply_chat_template(turns, tokenize=False)
        texts = [whole, whole.removesuffix(self.tokenizer.eos_token)]
        ids = [self.tokenizer(t, add_special_tokens=False, return_tensors="pt") for t in texts]
        with torch.no_grad():
            return [self.model(input_ids=each["input_ids"]).logits.item() for each in ids]


def bots(page: Page, column: int) -> list[str]:
    """Return what a model's column shows of its answers."""
    shown = page.locator("[aria-label='chatbot conversation']").nth(column)
    return shown.locator("[data-testid=bot]").evaluate_all("all => all.map(e => e.innerText)")


def ask(page: Page, text: str, wanted: int) -> list[list[str]]:
    """Type a question; return both models' answers to it, once there are as many as `wanted`."""
    field = page.get_by_label("You", exact=True)
    field.fill(text)
    field.press("Enter")
    seen = set()
    for _ in range(600):
        told = [bots(page, column) for column in (0, 1)]
        seen.add(str(told))
        if all(len(each) == wanted and BELOW.fullmatch("\n" + each[-1]) for each in told):
            return [each[-2:] for each in told]
        page.wait_for_timeout(50)
    raise AssertionError(f"after {text!r}: {told}")


def check(page: Page, rows: list[dict], judge: Judge, models: list[str]) -> float:
    """Ask each row's question; return the largest gap between scores."""
    gap = 0.0
    for number, row in enumerate(rows, 1):
        question = row["prompt"][-1]["content"]
        for model, texts in zip(models, ask(page, question, 2 * number), strict=True):
            given = row[model]
            scored = next(v for k, v in given["scores"].items() if k.startswith("scored_by_"))
            for how, text in zip(("greedy", "sampled"), texts, strict=True):
                # nothing is shown as an empty line that the browser leaves out
                answer, shown, score = BELOW.fullmatch(
                    text if "\n(" in text else f"\n{text}"
                ).groups()
                assert shown == how
                found = judge.scores(question, answer)
                apart = min(abs(float(score) - each) for each in found)
                if how == "greedy":
                    assert answer == given["greedy"], (model, answer, given["greedy"])
                    apart = abs(float(score) - scored)
                    assert min(abs(scored - each) for each in found) < CLOSE
                gap = max(gap, apart)
    return gap


def settings(page: Page, models: list[str], judge: Judge) -> None:
    """Use every setting, and the buttons."""
    page.get_by_role("button", name="Start anew").click()
    page.wait_for_timeout(500)
    assert not bots(page, 0) and not bots(page, 1)
    heat, length = page.locator("input[type=number]").all()
    for field, value in ((heat, "0"), (length, "2")):
        field.fill(value)
        field.press("Tab")
    for told in ask(page, "hello", 2):
        greedy, sampled = (re.sub(r"\n?\((greedy|sampled).*", "", text) for text in told)
        assert greedy == sampled, told  # at temperature 0
    page.get_by_label("You", exact=True).fill("<img src=x onerror=alert(1)>")
    page.get_by_label("You", exact=True).press("Enter")
    page.get_by_text("<img src=x onerror=alert(1)>").first.wait_for()  # is text
    page.wait_for_timeout(3000)  # for the answers
    page.get_by_label("You", exact=True).fill("a" * 10_000)
    page.get_by_label("You", exact=True).press("Enter")
    page.get_by_text("error: the longest prompt has 100").first.wait_for()
    page.get_by_role("button", name="Start anew").click()


def main() -> None:
    """Parse the options, evaluate, serve, open, use, report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs=2, help="of the embedded one's kind, the first a run")
    parser.add_argument("--reward_model", type=Path, required=True, help="run of recipes/reward.py")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--screenshot", type=Path)
    args = parser.parse_args()
    command = [sys.executable, "-u", "-m", "rlhf_trl.cli"]
    given = [*args.models, "--reward_model", str(args.reward_model)]
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.jsonl"
        told = ["--dataset.eval_size", "3", "--answers", str(answers)]
        subprocess.run([*command, "evaluate", *given, *told], check=True, capture_output=True)
        rows = [json.loads(line) for line in answers.read_text().splitlines()]
    pipes = {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, "HF_HUB_OFFLINE": "1"}}
    server = subprocess.Popen([*command, "chat", *given, "--ui"], **pipes)
    try:
        url = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline()).group()
        with sync_playwright() as playwright:
            options = {"executable_path": args.chromium, "args": ["--no-sandbox"]}
            browser = playwright.chromium.launch(**options)
            page = browser.new_context(viewport={"width": 1300, "height": 900}).new_page()
            elsewhere: list[str] = []
            faults: list[str] = []
            page.on("request", lambda r: r.url.startswith(url) or elsewhere.append(r.url))
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("dialog", lambda dialog: faults.append(dialog.message))
            page.goto(url)
            page.get_by_label("You", exact=True).wait_for()
            judge = Judge(args.reward_model)
            gap = check(page, rows, judge, args.models)
            if args.screenshot:
                page.screenshot(path=str(args.screenshot))
            settings(page, args.models, judge)
            assert gap < CLOSE and not elsewhere and not faults, (gap, elsewhere, faults)
            browser.close()
    finally:
        server.terminate()
        server.wait()
    print(f"{len(rows)} questions to {' and '.join(args.models)}: greedy answers are evaluation's,")
    print(f"scores within {gap:.1e}; no request but to {url}, no fault")


if __name__ == "__main__":
    main()
