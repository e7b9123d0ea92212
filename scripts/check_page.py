"""Open a page in headless Chromium, offline, use it, and compare it with the files it is made of.

    rlhf-trl rollouts outputs/grpo
    python scripts/check_page.py outputs/grpo --screenshot page.png
    rlhf-trl pipeline configs/pipeline/tiny.yaml
    python scripts/check_page.py outputs/pipeline

Needs `pip install playwright` and a Chromium (`apt-get install chromium`); no part of the tests.
"""

import argparse
import json
import sqlite3
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

MOST = 200  # samples that the page draws at once


def set_to(page: Page, field: str, value: object) -> None:
    """Give a field a value as a user would, so that the page notices."""
    script = "([id, value]) => { const field = document.getElementById(id); field.value = value;"
    page.evaluate(script + " field.dispatchEvent(new Event('input')); }", [field, str(value)])


def check(page: Page, database: sqlite3.Connection, found: dict) -> None:
    """Use every part of the page for its first run."""
    train = found["splits"]["train"]
    assert train["left_out"] == [1, 1] and set(found["splits"]) == {
        split for (split,) in database.execute("SELECT DISTINCT split FROM rollouts")
    }

    def shown(selector: str) -> list[str]:
        return page.locator(".run").first.locator(selector).all_inner_texts()

    def recorded(condition: str, *values: object, order: str = "generation, sample") -> list[str]:
        rows = database.execute(
            "SELECT completion FROM rollouts JOIN prompts ON id = prompt_id "
            f"WHERE split = 'train' AND {condition} ORDER BY {order} LIMIT {MOST}",
            values,
        )
        return [text for (text,) in rows]

    middle = len(train["shown"]) // 2
    number = train["shown"][middle]["generation"]
    set_to(page, "step", middle)
    assert f"after step {train['shown'][middle]['step']}" in page.inner_text("#where")
    assert shown("pre") == recorded("generation = ?", number)
    prompts = (
        "SELECT COUNT(DISTINCT group_id) FROM rollouts WHERE split = 'train' AND generation = ?"
    )
    assert [len(shown(".group"))] == [*database.execute(prompts, (number,)).fetchone()]
    page.click("#on")
    assert shown("pre") == recorded("generation = ?", number + 1)
    page.click("#back")

    for order, direction in (("best", "DESC"), ("worst", "ASC")):
        page.select_option("#order", order)
        wanted = recorded("generation = ?", number, order=f"reward {direction}, sample")
        assert shown("pre") == wanted, order
    page.select_option("#order", "")
    for value in ("1", "0"):
        page.select_option("#ended", value)
        assert shown("pre") == recorded("generation = ? AND finished = ?", number, int(value))
    page.select_option("#ended", "")
    set_to(page, "least", 0.4)
    set_to(page, "most", 0.9)
    assert shown("pre") == recorded("generation = ? AND reward BETWEEN .4 AND .9", number)
    set_to(page, "least", "")
    set_to(page, "most", "")

    word = found["prompts"][train["shown"][middle]["samples"][0][1]].split()[-1]
    set_to(page, "query", word.upper())
    page.select_option("#scope", "all")
    like = f"%{word.lower()}%"
    assert shown("pre") == recorded(
        "(LOWER(completion) LIKE ? OR LOWER(prompt) LIKE ?)", like, like
    )
    set_to(page, "query", "")
    page.select_option("#scope", "step")
    page.locator(".run .prompt").first.click()  # follow it over training
    prompt = found["prompts"][train["shown"][middle]["samples"][0][1]]
    assert shown("pre") == recorded("prompt = ?", prompt)
    page.click("#clear")

    answer = found["answers"][train["shown"][middle]["samples"][0][1]]
    assert shown(".right")[:1] == ([f"right answer: {answer}"] if answer else [])
    wide = page.viewport_size
    page.set_viewport_size({"width": 400, "height": 900})
    box = page.locator(".run pre").first.bounding_box()
    assert box["width"] > 300 and box["y"] < 900  # a completion is on the screen
    page.set_viewport_size(wide)

    for split in found["splits"]:
        page.select_option("#split", split)
        for metric in page.locator("#metric option").all_inner_texts():
            page.select_option("#metric", metric)
            assert page.locator("#curve polyline").first.get_attribute("points")
        assert shown("pre"), split
    page.select_option("#split", "train")


def check_aligned(page: Page) -> None:
    """Hold that prompts which all runs have stand at the same height in each."""
    heights = []
    for run in page.locator(".run").all():
        places = {}
        for prompt in run.locator(".prompt").all():
            places.setdefault(prompt.inner_text(), prompt.bounding_box()["y"])
        heights.append(places)
    for prompt in set.intersection(*map(set, heights)):
        assert len({places[prompt] for places in heights}) == 1, prompt


def check_pipeline(page: Page, folder: Path) -> None:
    """Look at every part of a pipeline's page, wide and narrow."""
    stages = json.loads((folder / "pipeline.json").read_text())["stages"]
    titles = [stage.get("title") or name for name, stage in stages.items()]
    assert page.locator(".settings summary").all_inner_texts() == titles
    for image in page.locator("img").all():
        assert image.evaluate("image => image.complete && image.naturalWidth > 500")
    for details in page.locator("details").all():
        inside = details.locator("table, pre").first
        assert not inside.is_visible()
        details.locator("summary").click()
        assert inside.is_visible()
    for width in (400, page.viewport_size["width"]):  # wide tables scroll by themselves
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    written = (folder / "ANALYSIS.md").read_text().splitlines()
    sentences = [line.removeprefix("- ") for line in written if line.startswith("- ")]
    assert page.locator(".sentence").all_inner_texts() == sentences


def main() -> None:
    """Parse the options, open, use, report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "run", type=Path, help="folder of a run with rollouts.html, or of a pipeline"
    )
    parser.add_argument("--page", type=Path, help="another page whose first run this is")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--screenshot", type=Path)
    parser.add_argument("--only_open", action="store_true", help="for a page that samples")
    args = parser.parse_args()
    of_pipeline = (args.run / "pipeline.json").is_file()
    path = args.page or args.run / ("page.html" if of_pipeline else "rollouts.html")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
        page = browser.new_context(offline=True, viewport={"width": 1300, "height": 900}).new_page()
        requests: list[str] = []
        faults: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text))
        page.on("dialog", lambda dialog: faults.append(dialog.message))
        started = time.perf_counter()
        page.goto(path.resolve().as_uri())
        page.wait_for_selector("table" if of_pipeline else ".sample")
        seconds = time.perf_counter() - started
        if of_pipeline:
            check_pipeline(page, args.run)
        elif not args.only_open:
            found = json.loads(page.locator("#data").text_content())[0]
            database = sqlite3.connect(args.run / "rollouts.sqlite")
            check(page, database, found)
            check_aligned(page)
        if args.screenshot:
            page.screenshot(path=str(args.screenshot))
        assert requests == [path.resolve().as_uri()] and not faults, (requests, faults)
        browser.close()
    print(f"{path}: {path.stat().st_size} bytes, open after {seconds:.2f} s, one request, no fault")


if __name__ == "__main__":
    main()
