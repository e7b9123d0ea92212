"""What all our trainers have in common: model cards of their own rows, and whole data sets."""

from dataclasses import replace

import direct_alignment_cases
import distillation_cases
import policy_gradient_cases
import ppo_cases
import pytest
import reward_model_cases
from datasets import Dataset
from huggingface_hub import ModelCard
from policy_gradient_cases import checkpoint
from trl import SFTConfig

from rlhf_trl.algorithms import ALGORITHMS
from rlhf_trl.errors import InputError
from rlhf_trl.tiny.tokenizer import build_tokenizer
from rlhf_trl.trainers.sft import BookSFTTrainer

# what a card says, who is cited first, and the paper's number
CARDS = {
    "reinforce": ("REINFORCE", "Ronald J. Williams", "10.1007/BF00992696"),
    "rloo": ("RLOO", "Arash Ahmadian", "2402.14740"),
    "ppo": ("PPO", "John Schulman", "1707.06347"),
    "grpo": ("GRPO", "Zhihong Shao", "2402.03300"),
    "drgrpo": ("Dr. GRPO", "Zichen Liu", "2503.20783"),
    "gspo": ("GSPO", "Chujie Zheng", "2507.18071"),
    "cispo": ("CISPO", "MiniMax", "2506.13585"),
    "cispo_window": ("CISPO over the window", "MiniMax", "2506.13585"),
    "sapo": ("SAPO", "Chang Gao", "2511.20347"),
    "dapo": ("DAPO", "Qiying Yu", "2503.14476"),
    "dapo_per_prompt": ("DAPO per prompt", "Qiying Yu", "2503.14476"),
    "maxrl": ("MaxRL", "Fahim Tajwar", "2602.02710"),
    "dpo": ("DPO", "Rafael Rafailov", "2305.18290"),
    "cdpo": ("cDPO", "Eric Mitchell", "ericmitchell.ai/cdpo.pdf"),
    "ipo": ("IPO", "Mohammad Gheshlaghi Azar", "2310.12036"),
    "simpo": ("SimPO", "Yu Meng", "2405.14734"),
    "orpo": ("ORPO", "Jiwoo Hong", "2403.07691"),
    "kto": ("KTO", "Kawin Ethayarajh", "2402.01306"),
    "dpo_norm": ("DPO-Norm", "Nathan Lambert", "2411.15124"),
    "apo_zero": ("APO-zero", "Karel D'Oosterlinck", "2408.06266"),
    "apo_down": ("APO-down", "Karel D'Oosterlinck", "2408.06266"),
    "reward": ("Bradley-Terry reward model", "Long Ouyang", "2203.02155"),
    "kwise": ("K-wise reward model", "Banghua Zhu", "2301.11270"),
    "orm": ("Outcome reward model", "Karl Cobbe", "2110.14168"),
    "prm": ("Process reward model", "Hunter Lightman", "2305.20050"),
    "opd": ("On-policy distillation", "Rishabh Agarwal", "2306.13649"),
    "sdpo": ("SDPO", "Jonas H", "2601.20802"),
}


def build(name, **config):
    family = ALGORITHMS[name].family
    if name == "ppo":
        return ppo_cases.build(**config)
    cases = {"policy_gradient": policy_gradient_cases, "direct_alignment": direct_alignment_cases}
    cases["distillation"] = distillation_cases
    return cases.get(family, reward_model_cases).build(name, **config)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_model_card_names_the_row_and_cites_its_paper(name, tmp_path):
    trainer = build(name, output_dir=str(tmp_path))
    trainer.create_model_card("mine")
    card = ModelCard.load(tmp_path / "README.md")
    title, author, number = CARDS[name]
    assert f"This model was trained with {title}" in card.text
    assert f"Its loss is `{name} (chapter)` of rlhf_trl." in card.text
    kind = {"reward-trainer"} if ALGORITHMS[name].family == "reward_model" else set()
    assert {*card.data.tags} == {"generated_from_trainer", "trl", name} | kind
    assert {*trainer.model.model_tags} == {"trl", name} | kind
    citation = card.text.partition(f"Cite {title} as:")[2].partition("Cite TRL as:")[0]
    assert author in citation and number in citation and citation.count("@") == 1
    if number[:4].isdigit() and "/" not in number:
        assert f"](https://huggingface.co/papers/{number})." in card.text


def test_the_card_of_an_added_row_says_what_the_row_says(tmp_path, monkeypatch):
    added = replace(ALGORITHMS["gspo"], title="SPO", paper="arXiv:2401.16025")
    monkeypatch.setitem(ALGORITHMS, "gspo", added)
    trainer = build("gspo", output_dir=str(tmp_path))
    trainer.create_model_card("mine")
    text = ModelCard.load(tmp_path / "README.md").text
    link = "[arXiv:2401.16025](https://huggingface.co/papers/2401.16025)"
    assert f"trained with SPO, a method introduced in {link}." in text


def test_papers_are_those_of_the_table():
    assert {name: number in ALGORITHMS[name].paper for name, (*_, number) in CARDS.items()} == {
        name: True for name in ALGORITHMS
    }


@pytest.mark.parametrize("name", ["dpo", "kto", "orpo", "kwise", "orm", "dapo"])
def test_a_streamed_data_set_is_refused_where_examples_are_counted(name, monkeypatch):
    from_list = Dataset.from_list
    monkeypatch.setattr(Dataset, "from_list", lambda rows: from_list(rows).to_iterable_dataset())
    more = {"dynamic_sampling_rounds": 1} if name == "dapo" else {}
    with pytest.raises(InputError, match=r"Trainer: a streamed data set .* load it whole"):
        build(name, max_steps=1, **more)


def test_a_streamed_data_set_trains_where_nothing_needs_its_length(tmp_path):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    fields = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    trainer = BookSFTTrainer(
        checkpoint(),
        SFTConfig(str(tmp_path), max_steps=1, gradient_checkpointing=False, **fields),
        train_dataset=Dataset.from_list([row] * 8).to_iterable_dataset(),
        processing_class=build_tokenizer(),
    )
    assert trainer.train().global_step == 1
