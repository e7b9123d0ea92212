"""The page of rollouts: what the record holds, as text, whatever the texts are, and small."""

import json
import re
import sqlite3
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rlhf_trl import cli
from rlhf_trl.errors import InputError
from rlhf_trl.output import RECORD
from rlhf_trl.rollouts import page
from rlhf_trl.rollouts.store import Rollouts, Store, right_answers

HOSTILE = [
    "</script><script>alert(1)</script>",
    "</ScRiPt ><img src=https://example.com/x onerror=alert(2)>",
    "<!-- <script> ",
    "--> ]]> DATA &lt; &amp; ${1} `x` \\u003c",
    "\"'\\ \u2028 \u2029 \x00 \x1f 🙂 \ufffd",
    "<b>bold</b>\n\ttab",
]


class Read(HTMLParser):
    """What a browser would make of a page: its elements, and the text of those with an id."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.elements, self.texts, self._id = [], {}, None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._id = dict(attrs).get("id", tag)

    def handle_data(self, data):
        self.texts[self._id] = self.texts.get(self._id, "") + data

    def runs(self):
        return json.loads(self.texts["data"])


def fill(folder, generations=1, size=2, text="answer", prompts=2, split="train", reward=0.5):
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder, Rollouts(), {})
    for number in range(generations):
        count = size * prompts
        samples = [
            (f"prompt {number * prompts + n // size}", f"{text} {number}.{n}", 3, n % 2 == 0, total)
            for n, total in enumerate(reward + number + n for n in range(count))
        ]
        rewards = {"right": [n % 2 for n in range(count)], "other": [None] * count}
        advantages = [(-1) ** n * 0.123456 for n in range(count)]
        store.write(split, number, (2 * number, 0.0), samples, rewards, advantages, size)
    store.close()
    return folder


def test_the_page_holds_what_is_recorded(tmp_path, capsys):
    run = fill(tmp_path / "run", generations=3)
    fill(run, split="eval-greedy", prompts=1)
    cli.main(["rollouts", str(run)])
    assert capsys.readouterr().out == f"{run}/rollouts.html is written; open it in a browser\n"
    (found,) = Read(run / "rollouts.html").runs()
    assert found["name"] == str(run)
    assert list(found["splits"]) == ["eval-greedy", "train"]
    train = found["splits"]["train"]
    assert train["names"] == ["right", "other"] and train["left_out"] == [1, 1]
    assert train["curves"] == [[n, 2 * n, 2 + n, 0.5, None, 0.5, 3] for n in range(3)]
    assert [(each["generation"], each["step"]) for each in train["shown"]] == [
        (0, 0),
        (1, 2),
        (2, 4),
    ]
    first = train["shown"][1]["samples"][0]
    group, prompt, completion, tokens, finished, reward, advantage, *each = first
    assert found["prompts"][prompt] == "prompt 2"
    assert (group, completion, tokens, finished) == (0, "answer 1.0", 3, 1)
    assert (reward, advantage, each) == (1.5, 0.1235, [0, None])
    assert [sample[0] for sample in train["shown"][1]["samples"]] == [0, 0, 1, 1]


def test_rewards_keep_their_names_after_a_resume_with_others(tmp_path):
    store = Store(tmp_path, Rollouts(), {})
    rewards = [{"right": [1.0, 0.0], "short": [0.25, 0.5]}, {"kind": [3.0, 5.0], "right": [0, 1]}]
    for number, each in enumerate(rewards):
        samples = [("prompt", f"answer {n}", 3, True, None) for n in range(2)]
        store.write("train", number, (number, 0.0), samples, each, samples_per_prompt=2)
    store.close()
    page.write_page([tmp_path], tmp_path / "page.html")
    (found,) = Read(tmp_path / "page.html").runs()
    train = found["splits"]["train"]
    assert train["names"] == ["right", "short", "kind"]
    assert [curve[3:6] for curve in train["curves"]] == [[0.5, 0.375, None], [0.5, None, 4]]
    shown = [[sample[7:] for sample in each["samples"]] for each in train["shown"]]
    assert shown == [[[1, 0.25, None], [0, 0.5, None]], [[0, None, 3], [1, None, 5]]]


def test_the_page_holds_the_right_answers(tmp_path):
    rows = [{"prompt": "p", "answer": "1"}, {"prompt": "p", "answer": None}]
    asked = [{"role": "user", "content": "q"}]
    more = [{"prompt": asked, "answer": 2}, {"prompt": asked, "answer": "b"}]
    store = Store(tmp_path, Rollouts(), {}, right_answers(rows, None, more, [{"prompt": "r"}]))
    samples = [(prompt, "said", 1, True, 1.0) for prompt in ("p", asked, "r")]
    store.write("train", 0, (0, 0.0), samples, {"right": [1, 1, 1]})
    store.close()
    page.write_page([tmp_path], tmp_path / "page.html")
    (found,) = Read(tmp_path / "page.html").runs()
    assert found["prompts"] == ["p", "q", "r"]
    assert found["answers"] == ["1", "2 or b", ""]
    with closing(sqlite3.connect(tmp_path / RECORD)) as connection:
        connection.execute("DROP TABLE answers")  # as where none are known
    page.write_page([tmp_path], tmp_path / "page.html")
    assert Read(tmp_path / "page.html").runs()[0]["answers"] == ["", "", ""]


def test_a_page_of_several_runs_does_not_replace_that_of_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a/seed-0", "b/seed-0", "a/seed-1"):
        fill(tmp_path / name)
    for others in ([], ["b/seed-0"], ["a/seed-1/", "b/seed-0"]):
        cli.main(["rollouts", "a/seed-0", *others])
    assert sorted(path.name for path in Path("a/seed-0").glob("*.html")) == [
        *("rollouts-b-seed-0.html", "rollouts-seed-1-b-seed-0.html", "rollouts.html"),
    ]


def test_no_text_is_read_as_html(tmp_path):
    run = tmp_path / HOSTILE[0].replace("/", "")
    run.mkdir()
    store = Store(run, Rollouts(), {})
    texts = zip(HOSTILE, HOSTILE[::-1], strict=True)
    samples = [(prompt, completion, 1, True, None) for prompt, completion in texts]
    store.write("train", 0, (0, 0.0), samples, {HOSTILE[0]: [1.0] * 6})
    store.close()
    page.write_page([run], tmp_path / "hostile.html")
    page.write_page([fill(tmp_path / "plain")], tmp_path / "plain.html")
    hostile, plain = Read(tmp_path / "hostile.html"), Read(tmp_path / "plain.html")
    assert hostile.elements == plain.elements  # not one more
    (found,) = hostile.runs()
    samples = found["splits"]["train"]["shown"][0]["samples"]
    assert [found["prompts"][sample[1]] for sample in samples] == HOSTILE
    assert [sample[2] for sample in samples] == HOSTILE[::-1]
    assert found["splits"]["train"]["names"] == [HOSTILE[0]]


def test_the_page_needs_nothing_else(tmp_path):
    page.write_page([fill(tmp_path / "run")], tmp_path / "page.html")
    read = Read(tmp_path / "page.html")
    assert not [e for e in read.elements if e[0] in ("link", "img", "iframe") or "src" in e[1]]
    (policy,) = [e["content"] for tag, e in read.elements if "http-equiv" in e]
    assert policy.startswith("default-src 'none';")
    text = (tmp_path / "page.html").read_text()
    assert {*re.findall(r"https?://[^\"' ]+", text)} == {"http://www.w3.org/2000/svg"}  # a name
    for word in ("innerHTML", "insertAdjacent", "document.write", "fetch(", "import("):
        assert word not in text


@pytest.mark.parametrize(
    ("text", "generations", "prompts", "least"),
    [("x" * 100, 400, 8, 60), ("<\n" * 1000, 4, 400, 4), ("é" * 2000, 70, 50, 12)],
)
def test_a_page_stays_small_and_says_what_it_leaves_out(
    tmp_path, capsys, text, generations, prompts, least
):
    run = fill(tmp_path / "run", generations, text=text, prompts=prompts)
    few = fill(run, 5, text="few", split="samples-greedy", prompts=1)
    limit = page.LIMIT
    try:
        page.LIMIT = 300_000
        cli.main(["rollouts", str(few), "--output", str(tmp_path / "page.html")])
    finally:
        page.LIMIT = limit
    html = tmp_path / "page.html"
    assert 100_000 < html.stat().st_size < 320_000
    (found,) = Read(html).runs()
    train, samples = found["splits"]["train"], found["splits"]["samples-greedy"]
    assert len(train["curves"]) == generations  # of all
    assert samples["left_out"] == [1, 1] and len(samples["shown"]) == 5
    shown = [each["generation"] for each in train["shown"]]
    assert shown[0] == 0 and len(shown) >= least
    kept = {found["prompts"][s[1]] for each in train["shown"] for s in each["samples"]}
    every, some = train["left_out"]
    assert len(shown) - generations // every in (0, 1, 2) and every * some > 1
    of_shown = prompts * len(shown)
    assert len(kept) == pytest.approx(of_shown / some, rel=0.6 if some > 1 else 0)


def test_two_runs_stand_side_by_side(tmp_path):
    runs = [fill(tmp_path / name, n + 1) for n, name in enumerate(("one", "two"))]
    page.write_page(runs, tmp_path / "page.html")
    found = Read(tmp_path / "page.html").runs()
    assert [(run["name"], len(run["splits"]["train"]["shown"])) for run in found] == [
        *((str(run), n + 1) for n, run in enumerate(runs))
    ]


def test_what_cannot_be_shown_is_refused(tmp_path):
    run = fill(tmp_path / "run")
    with pytest.raises(InputError, match=r"there is no rollouts.sqlite; name the folder"):
        page.write_page([tmp_path / "other"], tmp_path / "page.html")
    with pytest.raises(InputError, match=r"--output: .* cannot be written"):
        page.write_page([run], tmp_path / "run")
    with closing(sqlite3.connect(run / RECORD)) as connection, connection:
        connection.execute("DELETE FROM rollouts")
    with pytest.raises(InputError, match="nothing is recorded"):
        page.write_page([run], tmp_path / "page.html")
    (run / RECORD).write_text("mine " * 1000)
    with pytest.raises(InputError, match=r"cannot be read \(file is not a database\)"):
        page.write_page([run], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
