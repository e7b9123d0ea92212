"""Write sums in words in the shape of GSM8K, a JSON object a line; the same file every time.

    python scripts/word_sums.py outputs/word_sums.jsonl

A question tells how many things somebody has and what happens to them, once or twice, in numbers of
one digit; an answer counts along and ends in `#### ` and the number. No question occurs twice. With
`--slips 0.6` that share of the answers forgets the last event in the end: what a warm start learns
from, so that there is something left to do.
"""

import argparse
import json
import random
from pathlib import Path

NAMES = ["Ann", "Ben", "Eva", "Ida", "Leo", "Max", "Mia", "Tom"]
THINGS = ["apples", "books", "cards", "coins", "cups", "hats", "keys", "pens"]
EVENTS = [("buys", 1), ("finds", 1), ("gets", 1), ("drops", -1), ("loses", -1), ("sells", -1)]


def example(rng: random.Random, slips: float) -> dict[str, str]:
    """Return one `question` and `answer`."""
    number = rng.randint(2, 9)
    question, lines = f"{rng.choice(NAMES)} has {number} {rng.choice(THINGS)}", []
    for _ in range(rng.randint(1, 2)):
        verb, sign = rng.choice(EVENTS)
        before, change = number, sign * rng.randint(1, 5 if sign > 0 else min(5, number))
        number += change
        question += f", {verb} {abs(change)}"
        lines.append(f"{before}{change:+}=<<{before}{change:+}={number}>>{number}")
        if number == 0:
            break
    end = before if rng.random() < slips else number
    return {"question": f"{question}. How many now?", "answer": "\n".join([*lines, f"#### {end}"])}


def main() -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="where to write")
    parser.add_argument("--count", type=int, default=16_000, help="number of examples")
    parser.add_argument("--slips", type=float, default=0.0, help="share of wrong answers")
    parser.add_argument("--seed", type=int, default=0, help="draws them")
    options = parser.parse_args()
    rng, rows = random.Random(options.seed), {}
    while len(rows) < options.count:
        row = example(rng, options.slips)
        rows[row["question"]] = json.dumps(row)
    options.path.parent.mkdir(parents=True, exist_ok=True)
    options.path.write_text("\n".join([*rows.values(), ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
