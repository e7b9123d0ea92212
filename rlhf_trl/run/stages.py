"""The registry of stages: which recipe, fields, config, trainer and loader belong together.

Nothing here imports torch or TRL: classes and functions stand by their dotted paths, and are
imported when a stage is started.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_trl.algorithms import ALGORITHMS, Algorithm, Family, algorithm, names
from rlhf_trl.errors import InputError
from rlhf_trl.run.config import Loaded, load_config
from rlhf_trl.run.config_types import imported
from rlhf_trl.run.launch import recipe


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a script of recipes/ starts: a training run, or one that trains nothing.

    `run` takes what was loaded and, where the stage trains, the trainer's class.
    """

    name: str  # of the script, without its suffix
    fields: str  # the dataclass of its own fields
    run: str  # the function that does the whole run
    config: str | None = None  # TRL's config class or ours; None: it trains nothing
    trainer: str | None = None  # our trainer
    stock: str | None = None  # the name of TRL's trainer that ours stands on
    family: Family | None = None  # of the rows that it trains; None: it has none
    selects: Callable[[Algorithm], bool] = lambda row: True  # which of that family's rows
    known_by: frozenset[str] = frozenset()  # keys that every config of a stage without rows has
    makes: Literal["policy", "reward_model", "nothing"] = "policy"  # what it leaves behind
    prompted: bool = False  # whether it samples while it trains
    examples: str | None = None  # the function that loads what a policy's evaluation asks
    reads: frozenset[str] = frozenset()  # keys that may name what an earlier stage has made
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of `run`

    @property
    def script(self) -> str:
        """The path of its script, below `home()`."""
        return f"recipes/{self.name}.py"

    @property
    def trainer_name(self) -> str:
        """The name of our trainer's class; "" where nothing is trained."""
        return (self.trainer or "").rpartition(".")[2]

    @property
    def hook(self) -> str:
        """Where our trainer overrides TRL's: its file and class; "" where nothing is trained."""
        if self.trainer is None:
            return ""
        module, _, name = self.trainer.rpartition(".")
        return f"{module.replace('.', '/')}.py, {name}"

    def algorithms(self) -> list[str]:
        """Return the names of the rows that it trains, in the order of the table."""
        if self.family is None:
            return []
        return [name for name in names(self.family) if self.trains(ALGORITHMS[name])]

    def trains(self, row: Algorithm) -> bool:
        """Tell whether a row of the table is trained here."""
        return row.family == self.family and self.selects(row)

    def part(self, name: Literal["fields", "run", "config", "trainer", "examples"]) -> Any:
        """Import one of its parts."""
        return imported(getattr(self, name))

    def load(self, argv: Sequence[str] | None = None) -> Loaded:
        """Read a config as the script does; `argv` is by default the command line."""
        return load_config(self.part("fields"), self.config, argv)

    def main(self) -> None:
        """Read the command line and do the run."""
        loaded = self.load()
        run = self.part("run")
        if self.trainer is None:
            run(loaded, **self.options)
        else:
            run(loaded, self.part("trainer"), **self.options)

    def help(self, everything: bool) -> str:
        """Return what the script's `--help` says of fields; TRL's only those of its tiny config."""
        from rlhf_trl.run.help import fields_help

        config_class = (self.config or "").rpartition(".")[2]
        return fields_help(self.part("fields"), config_class, everything, self.name)

    def launch(self) -> None:
        """Do what its script does: `main`, where an `InputError` ends with its sentence."""
        recipe(self.main)


def _is_trained_by_group(row: Algorithm) -> bool:
    return row.chapter.value_loss == "none"


def _has_a_critic(row: Algorithm) -> bool:
    return row.chapter.value_loss != "none"


def _is_of_pairs(row: Algorithm) -> bool:
    # SimPO is trained on DPOTrainer here, and on CPOTrainer in TRL
    return row.chapter.trainer in ("DPOTrainer", "CPOTrainer")


def _compares_texts(row: Algorithm) -> bool:
    return row.chapter.aggregation == "none"


_FIELDS = "rlhf_trl.run.fields."
_EXAMPLES = "rlhf_trl.run.examples."
_TRAINERS = "rlhf_trl.trainers."
_START = frozenset({"model_name_or_path"})
_JUDGED = _START | {"reward_model"}
_FROM_SAMPLES = _START | {"dataset.sampled_from"}
_FROM_RANKED = _FROM_SAMPLES | {"dataset.scored_by"}

_ALL = (
    Stage(
        name="grpo",
        fields=_FIELDS + "policy_gradients.GRPORun",
        run="rlhf_trl.run.policy_gradients.train_policy",
        config=_TRAINERS + "policy_gradient.BookGRPOConfig",
        trainer=_TRAINERS + "policy_gradient.BookGRPOTrainer",
        stock="GRPOTrainer",
        family="policy_gradient",
        selects=_is_trained_by_group,
        prompted=True,
        examples=_EXAMPLES + "prompts",
        reads=_JUDGED,
    ),
    Stage(
        name="ppo",
        fields=_FIELDS + "policy_gradients.PPORun",
        run="rlhf_trl.run.policy_gradients.train_policy",
        config=_TRAINERS + "ppo.BookPPOConfig",
        trainer=_TRAINERS + "ppo.BookPPOTrainer",
        stock="GRPOTrainer",
        family="policy_gradient",
        selects=_has_a_critic,
        prompted=True,
        examples=_EXAMPLES + "prompts",
        reads=_JUDGED | {"value_model_name_or_path"},
    ),
    Stage(
        name="distill",
        fields=_FIELDS + "policy_gradients.DistillationRun",
        run="rlhf_trl.run.policy_gradients.train_policy",
        config=_TRAINERS + "distillation.BookDistillationConfig",
        trainer=_TRAINERS + "distillation.BookDistillationTrainer",
        stock="GRPOTrainer",
        family="distillation",
        prompted=True,
        examples=_EXAMPLES + "prompts",
        reads=_JUDGED | {"teacher_models"},
    ),
    Stage(
        name="dpo",
        fields=_FIELDS + "preferences.DPORun",
        run="rlhf_trl.run.preferences.train_preferences",
        config=_TRAINERS + "direct_alignment.BookDPOConfig",
        trainer=_TRAINERS + "direct_alignment.BookDPOTrainer",
        stock="DPOTrainer",
        family="direct_alignment",
        selects=_is_of_pairs,
        examples=_EXAMPLES + "pairs",
        reads=_FROM_RANKED,
    ),
    Stage(
        name="kto",
        fields=_FIELDS + "preferences.KTORun",
        run="rlhf_trl.run.preferences.train_preferences",
        config=_TRAINERS + "direct_alignment.BookKTOConfig",
        trainer=_TRAINERS + "direct_alignment.BookKTOTrainer",
        stock="KTOTrainer",
        family="direct_alignment",
        selects=lambda row: row.chapter.trainer == "KTOTrainer",
        examples=_EXAMPLES + "labeled",
        reads=_FROM_RANKED,
        options={"unpaired": True},
    ),
    Stage(
        name="orpo",
        fields=_FIELDS + "preferences.ORPORun",
        run="rlhf_trl.run.preferences.train_preferences",
        config=_TRAINERS + "orpo.BookORPOConfig",
        trainer=_TRAINERS + "orpo.BookORPOTrainer",
        stock="ORPOTrainer",
        family="direct_alignment",
        selects=lambda row: row.chapter.trainer == "ORPOTrainer",
        examples=_EXAMPLES + "pairs",
        reads=_FROM_RANKED,
    ),
    Stage(
        name="reward",
        fields=_FIELDS + "reward_models.RewardRun",
        run="rlhf_trl.run.reward_models.train_reward_model",
        config=_TRAINERS + "reward_models.BookRewardConfig",
        trainer=_TRAINERS + "reward_models.BookRewardTrainer",
        stock="RewardTrainer",
        family="reward_model",
        selects=_compares_texts,
        makes="reward_model",
        reads=_FROM_SAMPLES,
    ),
    Stage(
        name="orm",
        fields=_FIELDS + "reward_models.OutcomeRun",
        run="rlhf_trl.run.reward_models.train_reward_model",
        config=_TRAINERS + "reward_models.BookTokenRewardConfig",
        trainer=_TRAINERS + "reward_models.BookTokenRewardTrainer",
        stock="RewardTrainer",
        family="reward_model",
        selects=lambda row: row.name == "orm",
        makes="reward_model",
        reads=_FROM_SAMPLES,
    ),
    Stage(
        name="prm",
        fields=_FIELDS + "reward_models.ProcessRun",
        run="rlhf_trl.run.reward_models.train_reward_model",
        config=_TRAINERS + "reward_models.BookTokenRewardConfig",
        trainer=_TRAINERS + "reward_models.BookTokenRewardTrainer",
        stock="RewardTrainer",
        family="reward_model",
        selects=lambda row: row.name == "prm",
        makes="reward_model",
        reads=_FROM_SAMPLES,
    ),
    Stage(
        name="rejection_sampling",
        fields=_FIELDS + "supervised.RejectionSamplingRun",
        run="rlhf_trl.run.rejection_sampling.train_on_selected",
        config=_TRAINERS + "sft.BookSFTConfig",
        trainer=_TRAINERS + "sft.BookSFTTrainer",
        stock="SFTTrainer",
        known_by=frozenset({"dataset", "strategy"}),
        examples=_EXAMPLES + "prompts",
        reads=_JUDGED,
    ),
    Stage(
        name="sft",
        fields=_FIELDS + "supervised.SFTRun",
        run="rlhf_trl.run.supervised.train_supervised",
        config=_TRAINERS + "sft.BookSFTConfig",
        trainer=_TRAINERS + "sft.BookSFTTrainer",
        stock="SFTTrainer",
        known_by=frozenset({"dataset"}),
        examples=_EXAMPLES + "demonstrations",
        reads=_START,
    ),
)

STAGES: Mapping[str, Stage] = {stage.name: stage for stage in _ALL}
"""The stages by name; of those that have no rows, the more particular ones come first."""


def stage_of(name: str) -> Stage:
    """Return the stage that trains an algorithm; an unknown one is an `InputError`."""
    row = algorithm(name)
    for stage in STAGES.values():
        if stage.trains(row):
            return stage
    raise InputError(f"no stage of rlhf_trl/run/stages.py trains the row {name}; let one do so.")


def stage_of_config(values: Mapping[str, Any], place: str = "the config") -> Stage:
    """Return the stage that a config is for: by its `algorithm`, else by the keys that it has."""
    name = values.get("algorithm")
    if name is not None:
        return stage_of(name)
    for stage in STAGES.values():
        if stage.known_by and stage.known_by <= values.keys():
            return stage
    from rlhf_trl.run.config_faults import of_trl

    if hint := of_trl(values, place):
        raise InputError(f"{place}: {hint}.")
    raise InputError(
        f"{place} names no algorithm, and has the keys of no recipe ({', '.join(STAGES)}); write "
        "the algorithm, or the dataset that answers come from."
    )
