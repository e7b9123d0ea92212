"""The page of `rlhf-trl chat --ui`: the engine's answers side by side, as they are written."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from transformers import TextStreamer

from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.side_by_side import Policy
from rlhf_trl.run.chat import Answer, Chat


class _Pieces(TextStreamer):
    """Hands on what is written, piece by piece."""

    def __init__(self, tokenizer: Any, give: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._give = give

    # Replaces TextStreamer's, which prints.
    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._give(text)


def turn(chat: Chat, text: str) -> Iterator[list[list[str]]]:
    """Yield what each policy has said so far, a text per answer; closing it ends the writing."""
    said: list[list[str]] = [[] for _ in chat.policies]
    news: SimpleQueue[Any] = SimpleQueue()
    left = Event()

    def give(new: Any) -> None:
        if left.is_set():
            raise InterruptedError
        news.put(new)

    def streamer(policy: Policy, how: str) -> TextStreamer:
        give(policy)
        return _Pieces(policy.processing_class, give)

    def work() -> None:
        try:
            for answer in chat.ask(text, streamer):
                give(answer)
            news.put(None)
        except BaseException as error:
            news.put(error)

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        while (new := news.get()) is not None:
            if isinstance(new, BaseException):
                raise new
            if isinstance(new, Policy):
                column = said[chat.policies.index(new)]
                column.append("")
            elif isinstance(new, Answer):
                score = "" if new.score is None else f", score {new.score:.4f}"
                column[-1] = f"{new.text}\n({new.how}{score})"
            elif new:
                column[-1] += new
            else:  # no whole word yet
                continue
            yield said
    except InputError as error:
        told = f"error: {error}{' What was said is forgotten.' if chat.turns else ''}"
        chat.turns.clear()
        yield [[*column, told] for column in said]
    finally:
        left.set()
        thread.join()


def serve(*options: Any) -> None:
    """Serve the page of a `Chat` with these options to this machine only, until Ctrl-C.

    Raises:
        InputError: gradio is not installed; and what `Chat` says.
    """
    if find_spec("gradio") is None:
        raise InputError(
            "--ui: gradio is not installed; run scripts/setup.sh chat, or leave it out."
        )
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before the import, which reads it
    import gradio as gr

    chat = Chat(*options)
    empty = [[] for _ in chat.policies]
    plain = {"render_markdown": False, "latex_delimiters": [], "buttons": ["copy"], "height": 500}

    def answer(text: str, shown: Any, turns: Any, *settings: Any) -> Iterator[list[Any]]:
        if text.strip():
            chat.turns = dict(turns)  # this window's
            chat.set(*settings)
            before = [[*each, {"role": "user", "content": text}] for each in shown]
            for said in turn(chat, text.strip()):
                told = [[{"role": "assistant", "content": one} for one in each] for each in said]
                shown = [mine + new for mine, new in zip(before, told, strict=True)]
                yield ["", shown, chat.turns, *shown]

    with gr.Blocks(title="rlhf-trl chat", analytics_enabled=False, fill_width=True) as page:
        shown, turns = gr.State(empty), gr.State({})
        with gr.Row():
            columns = [gr.Chatbot(label=policy.name, **plain) for policy in chat.policies]
        text = gr.Textbox(label="You", placeholder="...".join(chat.frame), autofocus=True)
        with gr.Row():
            stop, anew = gr.Button("Stop"), gr.Button("Start anew")
        with gr.Row():
            length = chat.policies[0].max_completion_length
            settings = [
                gr.Number(chat.sampled.temperature, label="Temperature (sampled)", minimum=0),
                gr.Number(length, label="Length (tokens)", minimum=1, precision=0),
                gr.Textbox(chat.system, label="System prompt", visible=chat.system is not None),
            ]
        outputs = [text, shown, turns, *columns]
        asked = text.submit(answer, [text, shown, turns, *settings], outputs)
        stop.click(None, cancels=[asked])
        anew.click(partial(list, ["", empty, {}, *empty]), None, outputs, cancels=[asked])
    # its own themes take fonts from elsewhere
    theme = gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    given = {"server_name": "127.0.0.1", "share": False, "ssr_mode": False, "theme": theme}
    _, url, _ = page.launch(**given, footer_links=[], quiet=True, prevent_thread_lock=True)
    print(f"the page is at {url}, for this machine only; Ctrl-C ends", flush=True)
    page.block_thread()
