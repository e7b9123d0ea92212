"""What all our trainers have in common: they stand on methods of TRL and transformers."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, ParamSpec

from datasets import IterableDataset
from trl.trainer.utils import get_config_model_id
from typing_extensions import override

from rlhf_trl import algorithms, output
from rlhf_trl.errors import InputError, naming, reason_in_short, setting

Batch = dict[str, Any]  # tensors, by TRL's names
Parameters = ParamSpec("Parameters")


def with_signature_of(
    theirs: Callable[Parameters, None],
) -> Callable[[Callable[..., None]], Callable[Parameters, None]]:
    """Give an `__init__` TRL's signature; it gets what it was called with, all by name."""
    signature = inspect.signature(theirs)

    def decorate(ours: Callable[..., None]) -> Callable[Parameters, None]:
        @wraps(theirs, assigned=("__module__", "__name__", "__qualname__"))
        def init(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
            ours(**signature.bind(*args, **kwargs).arguments)

        return init

    return decorate


@contextmanager
def fields_set(args: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Give fields of a config other values, and the user's own ones back in the end."""
    before = {name: getattr(args, name) for name in values}
    vars(args).update(values)
    try:
        yield
    finally:
        vars(args).update(before)


@dataclass
class Safeguards:
    """Fields that TRL lacks and recipes turn on."""

    # what recipes have in place of the defaults, in this class and in those that extend it
    in_recipes: ClassVar = {"refuse_non_finite": True, "evaluate_examples": True}

    refuse_non_finite: bool = setting("stop before weights that are not finite are saved", False)
    chat_template_path: str | None = setting(
        "chatml, llama3, qwen3, gemma, mistral or zephyr, a .jinja file, or a model whose to take"
    )
    evaluate_examples: bool | None = setting(
        "metrics of all examples as one, not means over batches; None: but in formulation trl"
    )


class OnTRL:
    """Trainer mixin: a row, whose name is on the card, and what makes runs safe.

    A trainer of rows takes what its TRL trainer takes, with a config of its `config_class`, whose
    fields `algorithm` and `formulation` choose the row, or with a config of TRL's own class, whose
    loss is TRL's. A checkpoint is whole once it holds a manifest (see `output`), written last.
    """

    told: Mapping[str, Any] = MappingProxyType({})  # further facts for manifests
    save_checksums = True  # in manifests
    rollouts: Any = None  # the record, a `Store` that the main process writes
    config_class: ClassVar[type]
    _algorithm: str | None = None
    _stock = False  # whether TRL's own loss is computed

    def _take(self, args: Any, model: Any) -> Any:
        """Take the row that a config names, and return the config, filled in."""
        if args is None:  # as TRL names the folder
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = self.config_class(f"{name.split('/')[-1]}-{self._name}")
        resolved = self.config_class.resolve(args)
        self._row, self._parameters = resolved.row, dict(resolved.parameters)
        self._algorithm, self._formulation = resolved.algorithm, resolved.formulation
        self._stock = self._formulation == "trl"
        self.args = resolved.args
        return resolved.args

    @property
    def _logged(self) -> dict[str, list[Any]]:
        """The values that TRL's next log averages, by metric: those of training or evaluation."""
        return self._metrics["train" if self.model.training else "eval"]

    def _counts_examples(self) -> bool:
        """Tell whether examples are counted or ordered before training, so that none can stream."""
        return False

    def _evaluates_examples(self) -> bool:
        """Tell whether metrics are of all examples as one."""
        chosen = getattr(self.args, "evaluate_examples", None)
        return not self._stock if chosen is None else chosen

    def __init_subclass__(cls, **kwargs: Any):
        """Refuse a library that no longer has a method that is marked as overriding one."""
        super().__init_subclass__(**kwargs)
        theirs = [base for base in cls.__mro__ if _library(base) in ("trl", "transformers")]
        for base in cls.__mro__ if theirs else ():
            for name, method in vars(base).items():
                if base in theirs or not getattr(method, "__override__", False):
                    continue
                if not any(name in vars(other) for other in theirs):
                    library = _library(theirs[0])
                    raise InputError(
                        f"{library} {version(library)} has no {theirs[0].__name__}.{name}, which "
                        f"{cls.__name__} overrides; install the versions of constraints.txt."
                    )

    def __init__(self, *args: Any, **kwargs: Any):
        if self._counts_examples() and _streamed([args, kwargs]):
            raise InputError(
                f"{type(self).__name__}: a streamed data set (IterableDataset) cannot be counted "
                f"or ordered, as {self._row.label} needs with these settings; load it whole, with "
                "streaming=False."
            )
        if self._algorithm is not None:  # card and tags name the algorithm, not TRL's trainer
            general = [tag for tag in self._tag_names if tag != self._name.lower()]
            self._name = algorithms.ALGORITHMS[self._algorithm].title
            self._tag_names = [*general, self._algorithm]
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            from rlhf_trl import on_deepspeed

            on_deepspeed.allow_in_checkpoints()

    # Extends Trainer._save_checkpoint, which deletes older checkpoints before the new one is whole.
    @override
    def _save_checkpoint(self, model, trial):
        """Save a checkpoint, then its manifest, then push it, and only then delete older ones."""
        from rlhf_trl import checkpoints

        checkpoints.save(self, partial(super()._save_checkpoint, model), trial)

    # Extends create_model_card of TRL's trainers, which knows no formulations, and whose models
    # are None where they are folders.
    @override
    def create_model_card(self, *args, **kwargs):
        """Write a card that also names the formulation, the base model and the trained one."""
        from rlhf_trl import cards

        if self._algorithm is not None:
            self._paper = cards.paper(self._algorithm)
        super().create_model_card(*args, **kwargs)
        if not self.is_world_process_zero():
            return
        base = self.told.get("given", {}).get("model_name_or_path")
        loss = None if self._algorithm is None else self._row.label
        cards.complete(Path(self.args.output_dir), base, loss)

    # Extends Trainer.create_optimizer and create_scheduler: what they refuse names its keys.
    @override
    def create_optimizer(self, *args, **kwargs):
        """Create the optimizer."""
        with naming((), "optim, optim_args, adam_*"):
            return super().create_optimizer(*args, **kwargs)

    @override
    def create_scheduler(self, *args, **kwargs):
        """Create the schedule of the learning rate."""
        with naming((), "lr_scheduler_type, lr_scheduler_kwargs"):
            return super().create_scheduler(*args, **kwargs)

    def _save_state(self, folder: Path) -> None:
        """Write what a trainer adds to a checkpoint; all processes call it."""
        if self.rollouts is not None:  # so that a resumed run has no gap
            self.rollouts.flush()
        # TRL's count of tokens is not saved; this field is, which transformers then does not use
        if self.args.include_num_input_tokens_seen == "no":
            counted = getattr(self, "_total_train_tokens", 0)
            self.state.num_input_tokens_seen = max(self.state.num_input_tokens_seen, counted)
        if getattr(self.args, "sync_ref_model", False):
            from rlhf_trl import synced_reference

            synced_reference.save(self, folder)

    # Extends Trainer._load_optimizer_and_scheduler, which keeps the learning rate that was saved,
    # although max_steps or the schedule may have changed since.
    @override
    def _load_optimizer_and_scheduler(self, checkpoint):
        """Load a checkpoint, if there is one, with what `_save_state` has added to it."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        from rlhf_trl.checkpoints import follow_schedule

        # DeepSpeed's is wrapped by accelerate
        follow_schedule(getattr(self.lr_scheduler, "scheduler", self.lr_scheduler))
        if self.args.include_num_input_tokens_seen == "no":
            self._total_train_tokens = self.state.num_input_tokens_seen
        if getattr(self.args, "sync_ref_model", False):
            from rlhf_trl import synced_reference

            synced_reference.load(self, Path(checkpoint))

    # Extends Trainer._push_from_checkpoint: nothing is uploaded before it is whole.
    @override
    def _push_from_checkpoint(self, checkpoint_folder):
        if Path(checkpoint_folder, output.MANIFEST).exists():
            super()._push_from_checkpoint(checkpoint_folder)

    # Extends Trainer.init_hf_repo, with which all uploads begin: what stops it becomes a sentence.
    @override
    def init_hf_repo(self, *args, **kwargs):
        """Create the repository on the hub, or say why not."""
        try:
            super().init_hf_repo(*args, **kwargs)
        except Exception as error:  # of the hub or of the network, whose types have no common base
            raise InputError(
                f"push_to_hub: the hub has made no repository ({reason_in_short(error)}); go "
                "online and log in with `hf auth login`, or leave push_to_hub out."
            ) from None

    # Extends Trainer._run_epoch, which trains one step more where none is left.
    @override
    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)


def _library(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _streamed(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(map(_streamed, value.values() if isinstance(value, dict) else value))
    return isinstance(value, IterableDataset)
