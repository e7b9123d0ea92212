"""Examples as a trainer reads them: in a terminal, with marks on trained tokens, and as a page."""

import html
from collections.abc import Sequence
from itertools import groupby, zip_longest
from typing import Any

from rlhf_trl.run.fed import Fed

TRAINED = ("\x1b[1;32m", "\x1b[0m")  # bold green in a terminal
BRACKETS = ("[[", "]]")
NEW_LINE = "↵"  # of trained ends of lines
CLIPPED = 700  # letters of a text that a terminal shows, half of them from each end
STYLE = """body { font: 14px/1.45 system-ui, sans-serif; margin: 16px; color: #222;
  background: #f6f7f9; } h1 { font-size: 16px; } h2 { font-size: 14px; margin: 14px 0 4px; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #fff; border: 1px solid #dde;
  border-radius: 6px; padding: 8px 10px; margin: 0; font-size: 12.5px; }
  mark { background: #cdebcd; } .fault { color: #b00; } .sides { display: flex; gap: 12px; }
  .sides > div { flex: 1; min-width: 0; } .side { color: #667; font-size: 12px; }"""
MADE_BY = '<meta name="generator" content="rlhf-trl preview">'

Runs = list[tuple[str, bool]]  # pieces of a text, and whether they are trained


def pieces(text: Fed, tokenizer: Any) -> Runs:
    """Return a text in pieces of trained and other tokens, with special tokens as they are."""
    runs = []
    pairs = zip(text.ids, text.trained, strict=True)
    for is_trained, tokens in groupby(pairs, key=lambda pair: pair[1]):
        ids = [token for token, _ in tokens]
        runs.append((tokenizer.decode(ids, skip_special_tokens=False), is_trained))
    return runs


def shared_start(texts: Sequence[Fed]) -> int:
    """Return how many tokens, none of them trained, all texts of an example begin with."""
    count = 0
    for tokens in zip(*(zip(t.ids, t.trained, strict=True) for t in texts), strict=False):
        if tokens[0][1] or any(token != tokens[0] for token in tokens):
            break
        count += 1
    return count


def as_lines(example: Sequence[Fed], tokenizer: Any, width: int, in_color: bool) -> list[str]:
    """Return an example in lines; several texts stand side by side, below what they share."""
    if len(example) == 1:
        (text,) = example
        return [f"{text.name}:", *_wrapped(pieces(text, tokenizer), width, in_color)]
    start = shared_start(example)
    prompt = Fed("prompt", example[0].ids[:start], example[0].trained[:start])
    lines = ["prompt:", *_wrapped(pieces(prompt, tokenizer), width, in_color)]
    column = (width - 3 * (len(example) - 1)) // len(example)
    sides = []
    for text in example:
        rest = Fed(text.name, text.ids[start:], text.trained[start:])
        wrapped = _wrapped(pieces(rest, tokenizer), column, in_color, pad=True)
        sides.append([f"{text.name}:".ljust(column), *wrapped])
    rows = zip_longest(*sides, fillvalue=" " * column)
    return lines + [" | ".join(cells).rstrip() for cells in rows]


def _wrapped(runs: Runs, width: int, in_color: bool, pad: bool = False) -> list[str]:
    """Return pieces of a text in lines of at most `width` letters, marks aside."""
    start, end = TRAINED if in_color else BRACKETS
    room = width if in_color else width - 4  # brackets are letters, too
    letters = [(letter, is_trained) for piece, is_trained in runs for letter in piece]
    if len(letters) > CLIPPED:
        half = CLIPPED // 2
        gap = [(letter, False) for letter in f" ... {len(letters) - CLIPPED} letters ... "]
        letters = letters[:half] + gap + letters[-half:]
    lines: list[list[tuple[str, bool]]] = [[]]
    for letter, is_trained in letters:
        if letter == "\n" or len(lines[-1]) == room:
            lines.append([])
        if letter != "\n":
            lines[-1].append((letter, is_trained))
        elif is_trained:  # at the end of the line before
            lines[-2].append((NEW_LINE, is_trained))
    written = []
    for line in lines:
        text, size = "", len(line)
        for is_trained, group in groupby(line, key=lambda pair: pair[1]):
            piece = "".join(letter for letter, _ in group)
            text += f"{start}{piece}{end}" if is_trained else piece
            size += 0 if in_color or not is_trained else len(start) + len(end)
        written.append(text + " " * (width - size) * pad)
    return written


def as_html(title: str, above: str, faults: Sequence[str], examples: Sequence[str]) -> str:
    """Return a page that needs nothing else; `examples` are parts made by `example_html`."""
    listed = "".join(f'<p class="fault">{html.escape(fault)}</p>' for fault in faults)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">{MADE_BY}'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><h1>{html.escape(title)}</h1>"
        f"{listed}<pre>{html.escape(above)}</pre>{''.join(examples)}"
        "<p>Marked: tokens that are trained.</p></html>\n"
    )


def example_html(heading: str, example: Sequence[Fed], tokenizer: Any) -> str:
    """Return an example as a part of a page: its texts side by side, trained tokens marked."""
    sides = []
    for text in example:
        marked = "".join(
            f"<mark>{html.escape(piece)}</mark>" if is_trained else html.escape(piece)
            for piece, is_trained in pieces(text, tokenizer)
        )
        name = html.escape(f"{text.name}, {len(text.ids)} tokens")
        sides.append(f'<div><div class="side">{name}</div><pre>{marked}</pre></div>')
    return f'<h2>{html.escape(heading)}</h2><div class="sides">{"".join(sides)}</div>'
