"""The reward `llm_judge`: a judge's grades of completions, the book's generative reward model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_trl.data.answers import completion_text
from rlhf_trl.errors import InputError
from rlhf_trl.output import JUDGED
from rlhf_trl.rewards.judge import (
    GRADE,
    Judge,
    LLMJudge,
    conversation_text,
    fill_in,
    last_in_brackets,
    read_rubric,
)
from rlhf_trl.rewards.verifiers import RewardFunc

FEW = 20  # grades that say nothing yet about how many of them cannot be read
MOST = 0.05  # share of grades that may be unreadable


def llm_judge(block: Mapping[str, Any] | None, folder: str) -> RewardFunc:
    """Return the reward of a judge: its grades from 0, the worst, to 1, the best of the scale.

    A grade that cannot be read counts as the worst; more than 5 % of them end the run. So does a
    question without a reply: those that came are kept, and a resumed run pays for none again.

    Args:
        block: the values of `llm_judge:`; None is refused.
        folder: of the run, which keeps the replies; if it does not exist, they are not kept.
    """
    if not block:
        raise InputError("reward_funcs: llm_judge needs a block llm_judge with base_url and model.")
    who = LLMJudge(**block)
    rubric = read_rubric(who.rubric, "grade_rubric.txt", ["prompt", "answer"], "llm_judge.rubric")
    worst, best = who.scale
    judge = Judge(who, Path(folder, JUDGED) if Path(folder).is_dir() else ":memory:")
    count, unread = 0, list[str]()  # grades so far, and replies that held none

    async def llm_judge(prompts: Any, completions: Any, log_metric: Any, **_: Any) -> list[float]:
        """Grade completions; TRL awaits it beside other rewards."""
        nonlocal count
        questions = []
        for prompt, completion in zip(prompts, completions, strict=True):
            texts = {"prompt": conversation_text(prompt), "answer": completion_text(completion)}
            questions.append(fill_in(rubric, texts, {"worst": worst, "best": best}))
        asked, new = judge.count(), len(judge.unasked(questions))
        if asked + new > who.cap:
            raise InputError(
                f"llm_judge: {asked} requests were sent, and {new} more would exceed its cap of "
                f"{who.cap}; raise llm_judge.cap, then --resume_from_checkpoint auto goes on."
            )
        rewards = []
        for reply in await judge.ask(questions):
            if reply.text is None:
                raise InputError(
                    f"llm_judge: {who.base_url} did not reply ({reply.fault}); once it does, "
                    "--resume_from_checkpoint auto goes on and sends nothing twice."
                )
            grade = last_in_brackets(reply, GRADE)
            if grade is not None and worst <= float(grade) <= best:
                rewards.append((float(grade) - worst) / (best - worst))
            else:
                rewards.append(0.0)
                unread.append(reply.text)
        count += len(rewards)
        if count >= FEW and len(unread) > MOST * count:
            raise InputError(
                f"llm_judge: {len(unread)} of {count} replies hold no grade from {worst:g} to "
                f"{best:g}, such as {unread[0][-80:]!r}; take a better judge, a rubric that asks "
                "for a grade in double square brackets, or more max_tokens in llm_judge.request."
            )
        log_metric("llm_judge/unreadable", len(unread) / count)
        return rewards

    return llm_judge
