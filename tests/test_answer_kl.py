"""The KL of sampled answers: by enumeration, as from whole logits, within its memory."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from rlhf_trl.errors import InputError
from rlhf_trl.evaluation import answer_kl
from rlhf_trl.evaluation.answer_kl import kl_of_answers
from rlhf_trl.rollouts.generate import Completion

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.6,
}
# what each architecture does beyond a linear head, or in another place than most
KINDS = {
    "qwen3": {},
    "llama": {},
    "gemma2": {"final_logit_softcapping": 3.0, "sliding_window": 4},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 8},
}


def tokenizer_of(words):
    """A tokenizer of whole words; the last one ends an answer."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=words[-1], pad_token=words[-1]
    )


def policy(name, model, words, prompts):
    """What the KL reads of a `Policy`."""
    return SimpleNamespace(
        name=name,
        model=model,
        model_wrapped=model,
        processing_class=tokenizer_of(words),
        held_out=[{"prompt": prompt} for prompt in prompts],
        template=None,
        args=SimpleNamespace(per_device_eval_batch_size=3),
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )


def model_of(kind, vocabulary, seed, dtype=torch.float64):
    torch.manual_seed(seed)
    ends = {"bos_token_id": 0, "eos_token_id": vocabulary - 1, "pad_token_id": vocabulary - 1}
    config = AutoConfig.for_model(
        kind, **{**SIZES, **KINDS[kind], **ends, "vocab_size": vocabulary}
    )
    return AutoModelForCausalLM.from_config(config).eval().to(dtype)


def whole_logps(model, prompt, answer):
    """The log-probabilities before each token of an answer, of all logits at once."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def test_the_mean_over_all_answers_is_the_kl_of_their_distributions():
    """Two tokens, one of which ends the answer: every answer of at most five tokens is counted."""
    model, other = model_of("llama", 2, seed=1), model_of("llama", 2, seed=2)
    answers = [[0] * length + [1] for length in range(5)] + [[0] * 5]
    prompt = [0, 1, 0]
    logps, other_logps = [], []
    for one, sums in ((model, logps), (other, other_logps)):
        for answer in answers:
            by_token = whole_logps(one, prompt, answer)
            sums.append(sum(float(by_token[n, token]) for n, token in enumerate(answer)))
    weights = [math.exp(logp) for logp in logps]
    assert sum(weights) == pytest.approx(1, abs=1e-9)
    enumerated = sum(w * (p - q) for w, p, q in zip(weights, logps, other_logps, strict=True))
    assert enumerated > 0.05

    prompts = ["a <end> a"] * len(answers)
    both = [
        policy(name, one, ["a", "<end>"], prompts) for name, one in (("p", model), ("q", other))
    ]
    measured = kl_of_answers(*both, [Completion("", True, answer) for answer in answers])
    for name in ("kl", "kl_k1"):
        mean = sum(w * value for w, value in zip(weights, measured[name], strict=True))
        assert mean == pytest.approx(enumerated, abs=1e-9)
    # of a single answer, only k1 knows which tokens were drawn
    assert measured["kl_k1"][2] == pytest.approx(logps[2] - other_logps[2], abs=1e-9)
    assert min(measured["kl"]) >= 0 > min(measured["kl_k1"])


@pytest.mark.parametrize("kind", [*KINDS, "llama with LoRA"])
def test_it_is_that_of_whole_logits_in_every_architecture(kind, monkeypatch):
    # eager attention, which gemma2 takes, computes its softmax in float32, and there the last bits
    # depend on padding and on the machine
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda values, dim, dtype=None: softmax(values, dim)
    )
    words = [f"w{n}" for n in range(40)] + ["<end>"]
    architecture = kind.split()[0]
    model, other = model_of(architecture, 41, seed=1), model_of(architecture, 41, seed=2)
    if "LoRA" in kind:
        targets = ["q_proj", "down_proj", "lm_head"]
        model = get_peft_model(model, LoraConfig(r=2, target_modules=targets)).eval()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    prompts = ["w1 w2 w3", "w7", "w5 w30", "w9 w9 w9 w9", "w0 w1"]
    answers = [[4, 4, 12, 40], [8], [3, 1, 39, 0, 7, 40], [11, 12], [40]]
    both = [policy(name, one, words, prompts) for name, one in (("p", model), ("q", other))]
    completions = [Completion("", True, answer) for answer in answers]
    measured = kl_of_answers(*both, completions)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = [int(word[1:]) for word in prompt.split()]
        p, q = (whole_logps(one, ids, answer) for one in (model, other))
        places = torch.arange(len(answer)), torch.tensor(answer)
        assert float((p.exp() * (p - q)).sum()) == pytest.approx(measured["kl"][row], abs=1e-9)
        assert float((p - q)[places].sum()) == pytest.approx(measured["kl_k1"][row], abs=1e-9)
    monkeypatch.setattr(answer_kl, "LOGITS_AT_ONCE", 82)  # two positions
    chunked = kl_of_answers(*both, completions)
    for one in both:
        one.args.per_device_eval_batch_size = 1
    one_by_one = kl_of_answers(*both, completions)
    for name, values in measured.items():
        assert chunked[name] == pytest.approx(values, abs=1e-9)
        assert one_by_one[name] == pytest.approx(values, abs=1e-9)


def test_that_of_a_policy_to_itself_is_zero():
    model = model_of("gemma2", 9, seed=3)
    both = [policy("p", model, [*"abcdefgh", "<end>"], ["a b", "c"])] * 2
    measured = kl_of_answers(*both, [Completion("", True, [2, 3, 8]), Completion("", False, [5])])
    assert measured == {"kl": [0.0, 0.0], "kl_k1": [0.0, 0.0]}


def test_a_reference_with_another_tokenizer_is_refused():
    model = model_of("llama", 3, seed=1)
    one = policy("p", model, ["a", "b", "<end>"], ["a"])
    other = policy("q", model, ["a", "c", "<end>"], ["a"])
    with pytest.raises(InputError, match=r"q has another vocabulary than p, so .*same tokenizer"):
        kl_of_answers(one, other, [Completion("", True, [1])])


def test_a_model_without_an_output_layer_is_refused():
    one = policy("p", model_of("llama", 3, seed=1), ["a", "b", "<end>"], ["a"])
    one.model = SimpleNamespace(config=one.model.config, get_output_embeddings=lambda: None)
    with pytest.raises(InputError, match=r"--reference: p has no output layer of its own.*out\.$"):
        kl_of_answers(one, one, [Completion("", True, [1])])


MEMORY = """
import resource, sys, torch
sys.path.insert(0, "tests")
from test_answer_kl import Completion, kl_of_answers, model_of, policy
words = [f"w{n}" for n in range(151_935)] + ["<end>"]
both = [model_of("qwen3", 151_936, seed, torch.float32) for seed in (1, 2)]
both = [policy("a model", model, words, ["w1 w2"]) for model in both]
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
# what stays, however much is read: code, threads
kl_of_answers(*both, [Completion("", False, [5])])
before = peak()
(kl,) = kl_of_answers(*both, [Completion("", False, list(range(1024)))])["kl"]
assert kl > 0
print(peak() - before)
"""


@pytest.mark.promise
def test_a_long_answer_of_a_large_vocabulary_needs_less_than_a_gigabyte():
    """The logits of all positions would be 0.62 GB for each model, before any softmax."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, cwd=ROOT
    )
    needed = int(done.stdout)
    print(f"{needed / 1e6:.0f} MB")
    assert needed < 1e9
