"""What `rlhf-trl chat` does: an engine that answers what is typed, and a terminal around it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from os.path import commonprefix
from string import ascii_letters, digits
from typing import Any, NamedTuple

from rlhf_trl.data.answers import completion_text
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.side_by_side import Policy
from rlhf_trl.models import EMBEDDED
from rlhf_trl.rewards.from_model import load_reward_model
from rlhf_trl.rollouts.generate import GREEDY, Sampling
from rlhf_trl.run.named import config_of, load_run, named
from rlhf_trl.tiny.tokenizer import CHAT_TEMPLATE

# What a model of no run is asked with, beside the embedded model's settings.
PLAIN = "--use_cpu false --max_completion_length 256"
FEW = 20  # questions that may begin alike by chance


class Answer(NamedTuple):
    """What a policy says, `greedy` or `sampled`, and its score where a reward model gives one."""

    policy: str
    how: str
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
        found = [named(word) for word in models]
        judge = reward_model and named(reward_model, reward_model=True)
        if path := config_of(found, config):
            loaded, data = load_run(path, words)
        else:
            loaded, data = load_run(config_of([named(EMBEDDED)], None), [*PLAIN.split(), *words])
        args, prompts, self.messages = loaded.trl, data.train["prompt"][:1000], data.conversational
        self.policies = [model.load(loaded, self.messages) for model in found]
        for policy in self.policies if judge else ():
            policy.scorers = {"score": load_reward_model(judge.path, policy.processing_class, args)}
        how = Sampling()._asdict()
        for name, default in how.items():  # rejection sampling's are fields of the recipe
            how[name] = getattr(loaded.own, name, getattr(args, name, default))
        if temperature is not None:
            how["temperature"] = temperature
        self.sampled = Sampling(**how)
        if path and "chat_template_kwargs" in data.train.column_names:
            for policy in self.policies:
                policy.columns = {"chat_template_kwargs": data.train[0]["chat_template_kwargs"]}
        self.system, self.system_note = _system_message(prompts if self.messages else [])
        self.frame = _frame(map(completion_text, prompts)) if path else ("", "")
        single = self.policies[0].processing_class.chat_template == CHAT_TEMPLATE
        self.history = self.messages and (not single if history is None else history)
        self.turns: dict[str, list[dict[str, str]]] = {}

    def ask(self, text: str, streamer: Any = None) -> Iterator[Answer]:
        """Yield each policy's greedy and sampled answer.

        `streamer` takes a policy and how it answers; it returns what gets the tokens as they come.
        """
        start, end = self.frame
        text = text if start and text.startswith(start) else f"{start}{text}{end}"
        for policy in self.policies:
            turns = [*self.turns.get(policy.name, []), {"role": "user", "content": text}]
            first = [{"role": "system", "content": self.system}] if self.system else []
            prompt = [*first, *turns] if self.messages else text
            policy.check([{"prompt": prompt, **policy.columns}])
            for how, sampling in (("greedy", GREEDY), ("sampled", self.sampled)):
                said, scores = policy.reply(prompt, sampling, streamer and streamer(policy, how))
                if self.history and how == "greedy":
                    self.turns[policy.name] = [*turns, {"role": "assistant", "content": said.text}]
                yield Answer(policy.name, how, said.text, *scores.get("score", [None]))


def _system_message(prompts: Sequence[list[dict[str, str]]]) -> tuple[str, str]:
    """Return the system message that most prompts begin with, and a sentence about it.

    Where they have several, that is the commonest one. Both are empty where there is none, and the
    message is where most prompts have none.
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
    """Return the words that all texts begin with, and those that they then end with."""
    texts, word = list(dict.fromkeys(texts)), ascii_letters + digits
    start = commonprefix(texts).rstrip(word) if len(texts) >= FEW else ""  # noqa: RUF071
    rests = [text[len(start) :][::-1] for text in texts] if start else [""]
    return start, commonprefix(rests)[::-1].lstrip(word)  # noqa: RUF071


def talk(chat: Chat) -> None:
    """Answer what is typed until Ctrl-D; Ctrl-C stops an answer."""
    import readline  # noqa: F401 - lets `input` edit, and take lines of any length

    from transformers import TextStreamer

    wide = max(len(policy.name) for policy in chat.policies)

    def streamer(policy: Policy, how: str) -> TextStreamer:
        print(f"{policy.name:{wide}}  {how:7}  ", end="", flush=True)
        return TextStreamer(policy.processing_class, skip_prompt=True, skip_special_tokens=True)

    if any(chat.frame):
        print(f"each question reads: {'...'.join(chat.frame)} (the dots stand for what you type)")
    if chat.system_note:
        print(chat.system_note)
    turns = "follow on each other" if chat.history else "start anew"
    print(f"temperature {chat.sampled.temperature:g}; prompts {turns}; Ctrl-D ends")
    while True:
        try:
            if text := input("> ").strip():
                for answer in chat.ask(text, streamer):
                    if answer.score is not None:
                        print(f"{'':{wide}}  score    {answer.score:.3f}")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\nstopped; Ctrl-D ends")
        except InputError as error:
            print(f"error: {error}{' What was said is forgotten.' if chat.turns else ''}")
            chat.turns.clear()
