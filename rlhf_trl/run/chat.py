"""What `rlhf-trl chat` does: an engine that answers what is typed, and a terminal around it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from os.path import commonprefix
from string import ascii_letters, digits
from typing import Any, NamedTuple

from rlhf_trl.data.answers import completion_text
from rlhf_trl.data.examples import Examples
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.side_by_side import Policy
from rlhf_trl.models import EMBEDDED
from rlhf_trl.rewards.from_model import load_reward_model
from rlhf_trl.rollouts.generate import GREEDY, Sampling
from rlhf_trl.run.config import Loaded
from rlhf_trl.run.named import Named, config_of, load_run, named
from rlhf_trl.tiny.tokenizer import CHAT_TEMPLATE

# What a model of no run is asked with, beside the embedded model's settings.
PLAIN = "--use_cpu false --max_completion_length 256"
FEW = 20  # fewer questions may begin alike by chance
PROMPTS_READ = 1000  # so many prompts of a run are read to see what all of them share


class Answer(NamedTuple):
    """What a policy says, and its score where a reward model gives one."""

    policy: str
    method: str  # greedy or sampled
    text: str
    score: float | None


class Chat:
    """Policies, named as in `named`, that answer what is typed, asked as in training.

    System prompt, lengths and sampling are those of `config` (None: of the first run's), with
    `words` as on a recipe's command line; `system_note` says which rows have a system prompt.
    `history` says whether a prompt continues from the last ones and their greedy answers; None:
    yes, except for models of the embedded one's kind, which have seen single turns only. `frame`
    is the beginning and end that all questions of the run share; they go around what is typed.
    """

    def __init__(
        self,
        models: Sequence[str],
        config: str | None = None,
        words: Sequence[str] = (),
        temperature: float | None = None,
        reward_model: str | None = None,
        history: bool | None = None,
    ):
        """Load the models; `temperature` and `reward_model` are those of the command's options."""
        named_models = [named(word) for word in dict.fromkeys(models)]
        self._judge = named(reward_model, reward_model=True) if reward_model else None
        run_config = config_of(named_models, config)  # a path; None where no model is of a run
        loaded, data = _load(run_config, words)
        self._loaded = loaded
        self.messages = data.conversational  # whether prompts are messages, and not texts
        # what is typed is in no row of the data: it gets the template arguments of the first one
        self._columns: dict[str, Any] = {}
        if run_config and "chat_template_kwargs" in data.train.column_names:
            self._columns = {"chat_template_kwargs": data.train[0]["chat_template_kwargs"]}
        self._scorers: dict[str, Any] = {}
        self.policies = [self.load(model) for model in named_models]
        self.sampled = sampling_of(loaded, temperature)
        prompts = data.train["prompt"][:PROMPTS_READ]
        self.system, self.system_note = system_message(prompts if self.messages else [])
        # without a run, the data are the embedded model's, which no other model has seen
        self.frame = _frame(map(completion_text, prompts)) if run_config else ("", "")
        if history is None:  # models of the embedded one's kind are known by its chat template
            history = self.policies[0].processing_class.chat_template != CHAT_TEMPLATE
        self.history = self.messages and history
        self.turns: dict[str, list[dict[str, str]]] = {}  # by policy: questions and greedy answers

    def load(self, model: Named) -> Policy:
        """Load a model that is asked as in training, and scored where there is a reward model."""
        policy = model.load(self._loaded, self.messages)
        policy.columns = self._columns
        if self._judge and not self._scorers:  # once, for all policies, as `evaluate` does
            tokenizer = policy.processing_class
            score = load_reward_model(self._judge.path, tokenizer, self._loaded.trl)
            self._scorers["score"] = score
        policy.scorers = self._scorers
        return policy

    def replace(self, word: str) -> None:
        """Let a named model take the place of the last one, and forget what was said."""
        if any(word == policy.name for policy in self.policies):
            raise InputError(f"{word} is here already; name another model.")
        self.policies[-1] = self.load(named(word))
        self.turns.clear()

    def ask(
        self, text: str, streamer: Callable[[Policy, str], Any] | None = None
    ) -> Iterator[Answer]:
        """Yield each policy's greedy and sampled answer.

        `streamer` takes a policy and how it answers, "greedy" or "sampled"; it returns a streamer
        of transformers, which gets the tokens as they come.
        """
        start, end = self.frame
        is_framed = bool(start) and text.startswith(start)  # then a whole question was typed
        question = text if is_framed else f"{start}{text}{end}"
        for policy in self.policies:
            turns = [*self.turns.get(policy.name, []), {"role": "user", "content": question}]
            prompt: Any = question
            if self.messages:
                prompt = turns
                if self.system:
                    prompt = [{"role": "system", "content": self.system}, *turns]
            policy.check([{"prompt": prompt, **policy.columns}])  # refuses turns that are too long
            # both answers see the same turns; only the greedy one becomes a turn itself
            for method, sampling in (("greedy", GREEDY), ("sampled", self.sampled)):
                stream = streamer(policy, method) if streamer else None
                reply, scores = policy.reply(prompt, sampling, stream)
                if self.history and method == "greedy":
                    self.turns[policy.name] = [*turns, {"role": "assistant", "content": reply.text}]
                score = scores["score"][0] if "score" in scores else None  # of the one answer
                yield Answer(policy.name, method, reply.text, score)


def _load(run_config: str | None, words: Sequence[str]) -> tuple[Loaded, Examples]:
    """Load a run's config and data; without a run, those of the embedded model, for any model."""
    if run_config:
        return load_run(run_config, words)
    embedded_config = config_of([named(EMBEDDED)], None)
    return load_run(embedded_config, [*PLAIN.split(), *words])


def sampling_of(loaded: Loaded, temperature: float | None = None) -> Sampling:
    """Return how a run samples: by its recipe's fields or by TRL's, or with another temperature."""
    settings: dict[str, Any] = {}
    for name, default in Sampling()._asdict().items():
        settings[name] = getattr(loaded.own, name, getattr(loaded.trl, name, default))
    if temperature is not None:
        settings["temperature"] = temperature
    return Sampling(**settings)


def forget(chat: Chat) -> str:
    """Forget what was said; return a sentence that says so, "" where nothing was."""
    had_turns = bool(chat.turns)
    chat.turns.clear()
    return " What was said is forgotten." if had_turns else ""


def system_message(prompts: Sequence[list[dict[str, str]]]) -> tuple[str, str]:
    """Return the system message to send, and a sentence about it.

    The message is the commonest one of the prompts, or "" where most prompts have none. The
    sentence is "" where no prompt has one.
    """
    firsts = [prompt[0] for prompt in prompts]
    messages = Counter(first["content"] for first in firsts if first["role"] == "system")
    if not messages:
        return "", ""
    count = messages.total()
    share = "all rows" if count == len(prompts) else f"{count} of {len(prompts)} rows"
    if 2 * count < len(prompts):
        return "", f"{share} of the run have a system message; none is sent"
    (commonest, _), *others = messages.most_common()
    which = f"the commonest of {len(messages)}" if others else "it"
    return commonest, f"{share} of the run have a system message; {which} is sent: {commonest!r}"


def _frame(texts: Iterable[str]) -> tuple[str, str]:
    """Return the words that all texts begin with, and those that they then end with.

    `commonprefix` compares any strings, character by character. It may end within a word, whose
    letters are taken off again.
    """
    texts = list(dict.fromkeys(texts))
    if len(texts) < FEW:
        return "", ""
    letters = ascii_letters + digits
    start = commonprefix(texts).rstrip(letters)  # noqa: RUF071
    if not start:
        return "", ""
    # without their start, so that no character is in both; reversed, an end is a prefix
    reversed_ends = [text[len(start) :][::-1] for text in texts]
    return start, commonprefix(reversed_ends)[::-1].lstrip(letters)  # noqa: RUF071


def talk(chat: Chat) -> None:
    """Answer what is typed until Ctrl-D; Ctrl-C stops an answer."""
    import readline  # noqa: F401 - lets `input` edit, and take lines of any length

    from transformers import TextStreamer

    width = max(len(policy.name) for policy in chat.policies)

    def streamer(policy: Policy, method: str) -> TextStreamer:
        """Begin a line with who answers; return what prints the answer behind it."""
        print(f"{policy.name:{width}}  {method:7}  ", end="", flush=True)
        return TextStreamer(policy.processing_class, skip_prompt=True, skip_special_tokens=True)

    if any(chat.frame):
        print(f"each question reads: {'...'.join(chat.frame)} (the dots stand for what you type)")
    if chat.system_note:
        print(chat.system_note)
    prompts = "follow on each other" if chat.history else "start anew"
    print(f"temperature {chat.sampled.temperature:g}; prompts {prompts}; Ctrl-D ends")
    while True:
        try:
            text = input("> ").strip()
            if not text:
                continue
            for answer in chat.ask(text, streamer):
                if answer.score is not None:
                    print(f"{'':{width}}  score    {answer.score:.3f}")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\nstopped; Ctrl-D ends")
        except InputError as error:  # such as turns that are too long, as they would be next time
            print(f"error: {error}{forget(chat)}")
