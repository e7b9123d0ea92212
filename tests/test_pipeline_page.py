"""The page of a pipeline: what the files hold, as text, whatever the texts are, in one file."""

import json
import os
import struct
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest
import yaml
from pipeline_folder import PROBES, make_folder

from rlhf_trl.errors import InputError
from rlhf_trl.pipeline.page import learned_from, sections_of, write_page
from rlhf_trl.pipeline.results import read_results, summary

ROOT = Path(__file__).parent.parent
HOSTILE = "</td></pre><script>alert(1)</script> <!-- <b>&lt; {{ name }} {% if %} ${1} \u2028 🙂"
PREVIEW = {
    "rm": {"train": {"rows": 250, "tokens": {"chosen": {"90%": 12.5}}}, "held_out": None},
    "grpo": {"train": {"rows": 500}, "held_out": {"rows": 48}, "notes": ["a note"]},
}


class Read(HTMLParser):
    """What a browser would make of a page: its elements, its text, and the cells of its tables."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.elements, self.text, self.tables = [], "", []
        self._in_cell = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data):
        self.text += data
        if self._in_cell:
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("pipeline") / "out", probes=PROBES)
    (folder / "preview.json").write_text(json.dumps(PREVIEW))
    assert write_page(folder) == folder / "page.html"
    return folder


@pytest.fixture(scope="module")
def page(folder):
    return Read(folder / "page.html")


def test_the_page_needs_no_other_file(page):
    policy = page.elements[2][1]
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert policy["content"].startswith("default-src 'none';")
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "link", "iframe", "a"})
    sources = [attributes["src"] for _, attributes in page.elements if "src" in attributes]
    assert [source.partition(",")[0] for source in sources] == ["data:image/png;base64"] * 3


def test_the_preview_comes_first_and_the_summary_after_it(folder, page):
    headings = [attributes["id"] for tag, attributes in page.elements if tag == "h2"]
    assert headings[:3] == ["data", "models", "reward_models"]
    assert headings[3:5] == ["frontier", "distributions"]
    assert headings[5:] == ["failures", "training", "samples", "settings"]
    assert page.tables[0] == [
        ["", "rm", "grpo"],
        ["train, rows", "250", "500"],
        ["train, tokens, chosen, 90%", "12.5", "-"],
        ["held out", "-", "-"],
        ["held out, rows", "-", "48"],
        ["notes, 1", "-", "a note"],
    ]
    for row, line in zip(page.tables[1][1:], summary(read_results(folder)), strict=True):
        assert [row[0], *row[2:]] == [cell.replace(" ± ", "\xa0±\xa0") for cell in line.values()]
    assert page.tables[2][1] == [
        "rm",
        "offline pairs ranked by the right answers",
        "0.910\xa0±\xa00.010",
    ]


def test_costs_and_settings_are_those_of_the_files(folder, page):
    costs = next(table for table in page.tables if table[0][:2] == ["stage", "CPU s"])
    # 20, 21 and 22 CPU seconds of each of four stages, in 1, 2 and 3 starts
    expected = ["21.0 ± 1.0", "2 ± 1", "1.50 ± 0.00", "11.0 ± 1.0", "1 ± 0", "-", "-"]
    assert [cell.replace("\xa0", " ") for cell in costs[1]] == ["rm", *expected]
    assert [cell.replace("\xa0", " ") for cell in costs[-1][:2]] == ["all", "84.0 ± 4.0"]
    assert "recipes/grpo.py --config configs/tiny/grpo_beta.yaml" in page.text
    assert "beta: 0.3\n" in page.text
    assert f"reward_model: {folder}/rm/seed-0/model (ab12ab12ab12)" in page.text


def test_samples_have_their_numbers_and_say_where_they_were_cut_off(folder, page):
    side_by_side = next(table for table in page.tables if table[0][0] == "question")
    assert side_by_side[0][1:] == ["tiny (reference)", "sft", "GRPO", "GRPO, penalty"]
    lines = (folder / "answers" / "seed-0.jsonl").read_text().splitlines()
    replies = {json.loads(line)["tiny"]["question"]: json.loads(line)["tiny"] for line in lines}
    assert len(side_by_side) == 13
    for question, cell, *_ in side_by_side[1:]:
        sample = replies[question]["samples"][0]
        assert sample["text"] in cell and f"proxy {sample['scores']['scored_by_rm']:.2f}" in cell
        assert ("cut off" in cell) is not sample["finished"]
    best, *_ = sections_of(read_results(folder))["extremes"]["GRPO"]["best"]
    word = f"{folder}/grpo/seed-0"
    proxies = [
        sample["scores"]["scored_by_rm"]
        for line in lines
        for sample in json.loads(line)[word]["samples"]
    ]
    assert best["numbers"]["proxy"] == f"{max(proxies):.2f}"
    worst, *_ = sections_of(read_results(folder))["extremes"]["GRPO"]["worst"]
    assert worst["numbers"]["proxy"] == f"{min(proxies):.2f}"


def test_sentences_and_tables_are_in_the_markdown_too(folder, page):
    text = (folder / "table.md").read_text()
    sentences = [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- ")]
    assert len(sentences) == 2 and all(sentence in page.text for sentence in sentences)
    assert text.startswith("| model | learned from | gold, greedy | gold, sampled | proxy | KL |")


def test_probes_are_answered_side_by_side(folder, page):
    tables = [table for table in page.tables if table[0][0] == "question"]
    assert [table[0][1] for table in tables] == ["tiny (reference)"] * 3
    lines = [json.loads(line) for line in (folder / "answers/probes-seed-0.jsonl").open()]
    first = next(line for line in lines if line["tiny"]["category"] == "safety")
    answer = first[f"{folder}/grpo/seed-0"]["samples"][0]["text"]
    row = next(row for row in tables[2] if row[0] == first["tiny"]["question"])
    assert answer in row[tables[2][0].index("GRPO")]


def test_the_analysis_is_on_the_page_and_in_a_file(folder, page):
    text = (folder / "ANALYSIS.md").read_text()
    sentences = [line[2:] for line in text.splitlines() if line.startswith("- ")]
    assert len(sentences) > 10 and all(sentence in page.text for sentence in sentences)
    cells = [
        f"| {' | '.join(row)} |".replace("\xa0", " ") for table in page.tables for row in table
    ]
    analysis = text.partition("## Failures")[2]
    rows = [line for line in analysis.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) > 20 and set(rows) <= set(cells)


def test_figures_are_drawn(folder):
    for name in ("frontier.png", "distributions.png", "training.png"):
        content = (folder / name).read_bytes()
        width, height = struct.unpack(">II", content[16:24])
        assert content[1:4] == b"PNG" and width > 1000 and height > 500


def test_texts_stay_texts(tmp_path):
    folder = make_folder(tmp_path / "out", seeds=1, gold=None, text=HOSTILE, checkpoints=False)
    page = Read(write_page(folder))
    assert "script" not in {tag for tag, _ in page.elements}
    assert HOSTILE in page.text and HOSTILE not in (folder / "page.html").read_text()
    assert "There is no gold score." in page.text


def test_what_a_stage_learned_from(folder):
    results = read_results(folder)
    path = folder / "sft" / "seed-0" / "config.yaml"
    before = path.read_text()
    judge = str(folder / "rm" / "seed-0" / "model")
    cases = {
        "right answers": ("sft", {"demonstrator": "right"}),
        "answers of an imperfect demonstrator": ("sft", {}),
        "right answers (exact_match), the reward format": (
            "grpo",
            {"reward_funcs": ["exact_match", "format"]},
        ),
        "reward model rm": ("grpo", {"reward_funcs": [], "reward_model": judge}),
        "the reward format, reward model owner/name": (
            "ppo",
            {"reward_funcs": ["format"], "reward_model": "owner/name"},
        ),
        "on-policy pairs ranked by the right answers": ("dpo", {"dataset": {"pairs": "on_policy"}}),
        "pairs ranked by reward model rm": (
            "dpo",
            {"dataset": {"pairs": "on_policy", "scored_by": judge}},
        ),
        "steps that are right or wrong": ("prm", {"algorithm": "prm", "dataset": {}}),
        "answers of chats.jsonl": ("sft", {"dataset": {"path": "chats.jsonl"}}),
        "labels of pairs.jsonl": ("dpo", {"dataset": {"path": "pairs.jsonl"}}),
    }
    for expected, (recipe, config) in cases.items():
        path.write_text(yaml.safe_dump(config))
        results.stages["sft"]["recipe"] = f"recipes/{recipe}.py"
        assert learned_from(results, "sft") == expected
    path.write_text(before)


def test_a_folder_without_answers_is_refused_and_nothing_written(tmp_path):
    folder = make_folder(tmp_path / "out", seeds=1)
    (folder / "answers" / "seed-0.jsonl").unlink()
    with pytest.raises(InputError, match="run to its end"):
        write_page(folder)
    assert not list(folder.glob("*.png")) and not (folder / "page.html").exists()


def test_the_cells_of_the_notebook_run(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    os.makedirs("outputs")
    os.symlink(folder, "outputs/frontier")
    content = json.loads((ROOT / "recipes" / "pipeline.ipynb").read_text())
    names = {}
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert "| GRPO | 0.000 ± 0.000 | 0.000 ± 0.000 | 4.28 ± 0.03 |" in printed
    assert "of 3 seeds: over-optimization." in printed
    assert "step 60: AUC nan, 0 right, 160 wrong" in printed
    assert printed.splitlines()[-6] == "GRPO"
