"""The page of `rlhf-trl chat --ui`: the engine's answers side by side, as they are written."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html import escape
from importlib.util import find_spec
from queue import SimpleQueue
from threading import Event
from typing import Any

from transformers import TextStreamer

from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.side_by_side import Policy
from rlhf_trl.run.chat import Chat


def turn(chat: Chat, text: str) -> Iterator[dict[str, list[str]]]:
    """Yield the answers of each policy as far as they are written; closed, it stops the writing."""
    said: dict[str, list[str]] = {policy.name: [] for policy in chat.policies}
    news, left = SimpleQueue[bool](), Event()

    def streamer(policy: Policy, how: str) -> TextStreamer:
        def give(piece: str, stream_end: bool = False) -> None:
            if left.is_set():
                raise InterruptedError
            said[policy.name][-1] += piece
            if piece:
                news.put(True)

        said[policy.name].append("")
        found = TextStreamer(policy.processing_class, skip_prompt=True, skip_special_tokens=True)
        found.on_finalized_text = give  # instead of printing
        return found

    def work() -> None:
        for answer in chat.ask(text, streamer):
            score = "" if answer.score is None else f", score {answer.score:.4f}"
            said[answer.policy][-1] = f"{answer.text}\n({answer.how}{score})"
            news.put(True)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        done.add_done_callback(lambda _: news.put(False))
        try:
            while news.get():
                yield said
            done.result()
        except InputError as error:
            told = f"error: {error}{' What was said is forgotten.' if chat.turns else ''}"
            chat.turns.clear()
            yield {name: [*texts, told] for name, texts in said.items()}
        finally:
            left.set()


def serve(*options: Any) -> None:
    """Serve the page of a `Chat` with these options to this machine only, until Ctrl-C.

    The page has a column for each policy. It, not the `Chat`, keeps what was said: `turns`, as in
    `Chat`, and the messages that the columns show.
    """
    if find_spec("gradio") is None:
        raise InputError("--ui: gradio is not installed; run scripts/setup.sh chat, or omit --ui.")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before the import, which reads it
    import gradio as gr

    chat = Chat(*options)

    def message(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": escape(text, quote=False)}  # gradio takes it for HTML

    def answer(
        text: str, turns: Any, temperature: float, length: int, system: str, *columns: Any
    ) -> Iterator[list[Any]]:
        """Yield what the page then holds: an empty text box, the turns, each column's messages."""
        chat.sampled = chat.sampled._replace(temperature=temperature)
        chat.system = system
        chat.turns = dict(turns)
        for policy in chat.policies:
            policy.max_completion_length = policy.args.max_completion_length = length
        yield ["", turns, *columns]
        if not text.strip():
            return
        asked = [[*messages, message("user", text)] for messages in columns]
        for answers in turn(chat, text.strip()):
            answered = []
            for messages, texts in zip(asked, answers.values(), strict=True):
                answered.append(messages + [message("assistant", text) for text in texts])
            yield ["", chat.turns, *answered]

    with gr.Blocks(title="rlhf-trl chat", analytics_enabled=False, fill_width=True) as page:
        turns, plain = gr.State({}), {"render_markdown": False, "buttons": []}
        with gr.Row():
            names = dict.fromkeys(policy.name for policy in chat.policies)
            columns = [gr.Chatbot(label=name, height=500, **plain) for name in names]
        text = gr.Textbox(label="You", placeholder="...".join(chat.frame))
        with gr.Row():
            stop = gr.Button("Stop")
            gr.ClearButton([turns, *columns], value="Start anew")
        with gr.Row():
            temperature = chat.sampled.temperature
            length = chat.policies[0].max_completion_length
            label = "Temperature of sampled answers"
            settings = [
                gr.Slider(0, max(2, temperature), temperature, label=label),
                gr.Slider(1, max(1024, length), length, step=1, label="Length in tokens"),
                gr.Textbox(
                    chat.system,
                    label="System prompt",
                    info=chat.system_note or None,
                    visible=chat.messages,
                ),
            ]
        inputs = [text, turns, *settings, *columns]  # the arguments of `answer`
        event = text.submit(answer, inputs, [text, turns, *columns])
        stop.click(None, cancels=[event])
    # gradio's own theme comes with fonts
    theme = gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    where = {"server_name": "127.0.0.1", "share": False, "ssr_mode": False}
    how = {"theme": theme, "footer_links": [], "quiet": True, "prevent_thread_lock": True}
    _, url, _ = page.launch(**where, **how)
    print(f"the page is at {url}, for this machine only; Ctrl-C ends", flush=True)
    page.block_thread()
