"""The page of `rlhf-trl chat --ui`: the engine's answers side by side, as they are written."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from html import escape
from importlib.util import find_spec
from queue import SimpleQueue
from threading import Event
from typing import Any

from transformers import TextStreamer

from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.side_by_side import Policy
from rlhf_trl.run.chat import Chat, forget


class _Stream(TextStreamer):
    """Hands what a policy writes to a function, piece by piece, instead of printing it."""

    def __init__(self, tokenizer: Any, take: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._take = take

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Hand on a piece of the answer."""
        self._take(text)


def turn(chat: Chat, text: str) -> Iterator[dict[str, list[str]]]:
    """Yield the answers of each policy, by its name, as far as they are written.

    It yields one and the same dictionary again and again, which the thread goes on filling.

    A thread of its own lets the policies answer. It puts True into a queue whenever the page has
    something new to show, and False once it has ended. When the page goes, this generator is
    closed, which stops the writing.
    """
    answers: dict[str, list[str]] = {policy.name: [] for policy in chat.policies}
    updates = SimpleQueue[bool]()
    page_closed = Event()

    def begin_answer(policy: Policy, method: str) -> TextStreamer:
        """Add an empty answer; return what extends it while the model writes."""
        texts = answers[policy.name]
        texts.append("")

        def extend(piece: str) -> None:
            if page_closed.is_set():
                raise InterruptedError  # ends the generation
            texts[-1] += piece
            if piece:  # it is "" while a word is not complete
                updates.put(True)

        return _Stream(policy.processing_class, extend)

    def answer_all() -> None:
        """Let all policies answer, in the thread; whole answers get their method and score."""
        for answer in chat.ask(text, begin_answer):
            score = "" if answer.score is None else f", score {answer.score:.4f}"
            answers[answer.policy][-1] = f"{answer.text}\n({answer.method}{score})"
            updates.put(True)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(answer_all)
        writing.add_done_callback(lambda _: updates.put(False))
        try:
            while updates.get():
                yield answers
            writing.result()  # raises what went wrong in the thread
        except InputError as error:
            note = forget(chat)  # an error ends the conversation: half an answer may be in it
            sentence = f"error: {error}{note}"
            yield {name: [*texts, sentence] for name, texts in answers.items()}
        finally:
            page_closed.set()


def serve(*models_and_options: Any, port: int | None = None, **options: Any) -> None:
    """Serve the page of a `Chat` with these options to this machine only, until Ctrl-C.

    One `Chat` serves every page that is open. So each page keeps what was said on it: its `turns`,
    as `Chat` has them, and the messages of its columns, one column for each policy. Each question
    brings the page's turns and settings along, and sets the `Chat` to them.

    Args:
        models_and_options: arguments of `Chat`.
        port: where the page is served; None: at a free port.
        options: further arguments of `Chat`.
    """
    if port is not None and not 0 < port < 65536:
        raise InputError(f"--port is {port}; write a number from 1 to 65535.")
    if find_spec("gradio") is None:
        raise InputError("--ui: gradio is not installed; run scripts/setup.sh chat, or omit --ui.")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before the import, which reads it
    import gradio as gr

    chat = Chat(*models_and_options, **options)

    def message(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": escape(text, quote=False)}  # gradio takes it for HTML

    def answer(
        text: str, turns: Any, temperature: float, length: int, system: str, *columns: Any
    ) -> Iterator[list[Any]]:
        """Yield what the page then holds: an empty text box, the turns, each column's messages.

        The arguments are the values of what `_page` calls inputs, the columns' messages last.
        """
        chat.sampled = chat.sampled._replace(temperature=temperature)
        chat.system = system
        chat.turns = dict(turns)  # a copy: `ask` changes it
        for policy in chat.policies:
            policy.max_completion_length = length  # for its answers
            policy.args.max_completion_length = length  # for the check that they fit the context
        yield ["", turns, *columns]  # empties the text box at once
        if not text.strip():
            return
        with_question = [[*messages, message("user", text)] for messages in columns]
        for answers in turn(chat, text.strip()):
            with_answers = []
            for messages, texts in zip(with_question, answers.values(), strict=True):
                with_answers.append(messages + [message("assistant", text) for text in texts])
            yield ["", chat.turns, *with_answers]

    def replace(word: str) -> list[Any]:
        """Load another model, and return an empty box, no turns, and the emptied columns."""
        try:
            chat.replace(word.strip())
        except InputError as error:
            sentence = escape(str(error), quote=False)
            raise gr.Error(sentence, print_exception=False) from error
        names = dict.fromkeys(policy.name for policy in chat.policies)
        return ["", {}, *(gr.update(value=[], label=name) for name in names)]

    page = _page(gr, chat, answer, replace)
    url = _launch(gr, page, port)
    print(f"the page is at {url}, for this machine only; Ctrl-C ends", flush=True)
    page.block_thread()


def _launch(gr: Any, page: Any, port: int | None) -> str:
    """Begin to serve a page to this machine, and return its address."""
    # gradio's own theme comes with fonts
    theme = gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    try:
        _, url, _ = page.launch(
            server_name="127.0.0.1",
            server_port=port,
            share=False,
            ssr_mode=False,
            theme=theme,
            footer_links=[],
            quiet=True,
            prevent_thread_lock=True,  # returns, so that the address can be printed
        )
    except OSError as error:
        raise InputError(f"--port: {port} is in use; name another, or leave it out.") from error
    return url


def _page(
    gr: Any,
    chat: Chat,
    answer: Callable[..., Iterator[list[Any]]],
    replace: Callable[[str], list[Any]],
) -> Any:
    """Return the page: a column for each policy, a text box, its buttons and settings.

    Args:
        gr: the module gradio.
        chat: with the policies, and the settings to begin with.
        answer: what gradio calls with the values of `inputs` when a question is sent; it yields
            those of the text box, the turns and the columns.
        replace: what gradio calls with the name of another model, for the last column.
    """
    with gr.Blocks(title="rlhf-trl chat", analytics_enabled=False, fill_width=True) as page:
        turns = gr.State({})
        with gr.Row():
            columns = [  # one for each name, as in `turn`: policies of one name share a column
                gr.Chatbot(label=name, height=500, render_markdown=False, buttons=[])
                for name in dict.fromkeys(policy.name for policy in chat.policies)
            ]
        text = gr.Textbox(label="You", placeholder="...".join(chat.frame))
        with gr.Row():
            stop = gr.Button("Stop")
            gr.ClearButton([turns, *columns], value="Start anew")
        with gr.Row():
            temperature = chat.sampled.temperature
            length = chat.policies[0].max_completion_length
            settings = [
                gr.Slider(
                    0,
                    max(2, temperature),
                    temperature,
                    label="Temperature of sampled answers",
                ),
                gr.Slider(1, max(1024, length), length, step=1, label="Length in tokens"),
                gr.Textbox(
                    chat.system,
                    label="System prompt",
                    info=chat.system_note or None,
                    visible=chat.messages,
                ),
            ]
        another = gr.Textbox(
            label="Load another model in place of the last, and start anew",
            placeholder="run, checkpoint, folder or hub name",
        )
        another.submit(replace, another, [another, turns, *columns])
        inputs = [text, turns, *settings, *columns]  # the arguments of `answer`
        event = text.submit(answer, inputs, [text, turns, *columns])
        stop.click(None, cancels=[event])  # closes the generator that `answer` is
    return page
