"""One run up to its report: begin or resume, read, build the trainer, train, evaluate, export."""

import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from jinja2 import TemplateError
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from rlhf_trl import output
from rlhf_trl.data.blocks import FileData
from rlhf_trl.data.examples import OF_TEXTS, Examples
from rlhf_trl.errors import Diverged, InputError, naming
from rlhf_trl.evaluation.held_out import AnswersHeldOut
from rlhf_trl.evaluation.standstill import Watch
from rlhf_trl.models import UNTRAINED, as_saved, load_quietly, model_config, prepare_model
from rlhf_trl.run import launch
from rlhf_trl.run.config import Loaded
from rlhf_trl.run.kinds import kind_of
from rlhf_trl.run.signals import signals
from rlhf_trl.run.stopping import Stop
from rlhf_trl.run.versions import versions

TRACKERS = ("tensorboard", "trackio", "wandb")  # each an extra of this package
PACKAGES = {"azure_ml": "azureml", "flyte": "flytekit"}  # of trackers with a name unlike theirs


class _StartOfTraining(TrainerCallback):
    """Checks how the model was wrapped, and rewinds the record of rollouts to the checkpoint."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        launch.check_wrapper(self._trainer)
        if (record := self._trainer.rollouts) is not None and state.is_world_process_zero:
            # of a policy-gradient trainer: what it has brought back from its checkpoint
            carried = getattr(self._trainer, "_carried", {})
            record.rewind(state.global_step, carried.get("generation", 0))


@contextmanager
def _naming_divergence(trainer: Any) -> Iterator[None]:
    """Say in one sentence that no token can be drawn from what a model computes."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        from rlhf_trl.checkpoints import last_good

        raise Diverged(
            f"the model's probabilities are no longer numbers at step "
            f"{trainer.state.global_step}: training has diverged; {last_good(trainer.args)}."
        ) from error


@dataclass
class _Start:
    """Where a run starts; the main process finds it out for all."""

    checkpoint: str | None = None  # to go on from
    is_evaluated: bool = False  # whether that step has its evaluation
    refusal: str | None = None  # why the run may not start
    nothing_left: str | None = None  # what to say where it has finished before


def begin(
    loaded: Loaded[Any, Any],
    name: str,
    note: str | None = None,
    detail: Callable[[Loaded[Any, Any]], str] | None = None,
) -> None:
    """Check the launch, claim the output folder, find the checkpoint, say what is about to run.

    For a recipe that trains nothing, the folder is claimed and the config kept there; that is all.
    `name` says what is trained, and `note` is one more sentence to print; `detail` returns what the
    first line ends with, once it is known where the run starts.
    """
    from rlhf_trl.run.claiming import claim
    from rlhf_trl.run.origins import begin_reading, find_models

    find_models(loaded)  # puts the folder of a reward model or teacher in place of the run's name
    if loaded.trl is None:  # the recipe trains nothing
        claim(loaded.own.output_dir, None)
        print(name, flush=True)
        loaded.save(Path(loaded.own.output_dir, "config.yaml"))
        return
    if not loaded.given.get("output_dir"):
        raise InputError("output_dir is missing; name the folder that the run writes to.")
    args = loaded.trl
    signals.begin(Path(args.output_dir))
    launch.check_processes(args, loaded.own.expect)
    first_line = launch.describe_launch(args, name, kind_of(args, loaded.row))
    _check_settings(args)

    start = _Start()
    if args.process_index == 0:  # alone, as it claims the folder and prints
        start = _start_of(loaded)
    (start,) = broadcast_object_list([start])
    if start.refusal is not None:  # on every process, or the others would wait for this one
        raise InputError(start.refusal)
    if start.nothing_left is not None:
        if args.process_index == 0:
            print(start.nothing_left, flush=True)
        raise SystemExit(0)  # no error: a command that is repeated ends well

    _decide_settings(loaded, start)
    if args.process_index == 0:  # hashes, in the background, the weights that the run starts from
        begin_reading(loaded.given, args.output_dir)
    load_quietly()
    if detail is not None:
        first_line += f"; {detail(loaded)}"
    _announce(args, [first_line] if note is None else [first_line, note])


def _decide_settings(loaded: Loaded[Any, Any], start: _Start) -> None:
    """Set what of TRL's settings depends on where a run starts, or is another in recipes."""
    args = loaded.trl
    args.resume_from_checkpoint = start.checkpoint
    if "eval_on_start" not in loaded.given:
        args.eval_on_start = not start.is_evaluated
    if "logging_first_step" not in loaded.given:
        args.logging_first_step = True
    if "disable_tqdm" not in loaded.given and not sys.stderr.isatty():
        args.disable_tqdm = True  # a file gets lines of the log instead of a bar
    # transformers gives wandb this variable, by default "huggingface", and not the field `project`
    os.environ.setdefault("WANDB_PROJECT", args.project)
    args.run_name = os.environ.get("WANDB_RUN_NAME", args.run_name)
    if args.run_name is None and "trackio" in args.report_to:
        # what is logged after training, when trackio has ended the run, goes to that of this name
        args.run_name = Path(args.output_dir).name


def _check_settings(args: Any) -> None:
    """Refuse settings of TRL that train nothing, need what is missing, or spoil a resumed run."""
    if args.max_steps == 0:
        raise InputError("max_steps is 0, which trains nothing; write 1 or more.")
    if args.max_steps < -1:
        raise InputError(
            f"max_steps is {args.max_steps}; write 1 or more, or -1 to train for num_train_epochs."
        )
    for tracker in args.report_to:
        if find_spec(PACKAGES.get(tracker, tracker)) is None:
            remedy = "install it"
            if tracker in TRACKERS:
                remedy = f"run scripts/setup.sh {tracker}"
            raise InputError(f"report_to: {tracker} is missing; {remedy} or write none.")
    if args.load_best_model_at_end and args.save_strategy == "no":
        raise InputError("load_best_model_at_end: none is kept with save_strategy: no; write it.")
    for key in ("ignore_data_skip", "enable_jit_checkpoint"):
        if getattr(args, key):
            raise InputError(f"{key}: a run resumed with it would not be the same one; remove it.")


def _start_of(loaded: Loaded[Any, Any]) -> _Start:
    """Claim the output folder, and find out from what it holds where the run starts."""
    from rlhf_trl.run.claiming import claim

    args, folder = loaded.trl, Path(loaded.trl.output_dir)
    start = _Start()
    try:
        start.checkpoint = claim(str(folder), args.resume_from_checkpoint)
        if start.checkpoint is not None:
            from rlhf_trl.manifests import step_of
            from rlhf_trl.run.resuming import check_resume, is_evaluated

            check_resume(loaded, start.checkpoint)
            evaluations = output.numbered(folder, "evaluations/step-")  # their files, by step
            start.is_evaluated = is_evaluated(args, step_of(start.checkpoint), evaluations)
        if output.finished(folder):
            from rlhf_trl.run.resuming import steps_left

            if not steps_left(loaded, start.checkpoint):
                remedy = "raise max_steps to go on"
                if start.checkpoint is None:
                    remedy = "name another --output_dir"
                start.nothing_left = f"{folder} holds a finished run; {remedy}."
    except InputError as error:
        start.refusal = str(error)
    return start


def _announce(args: Any, lines: list[str]) -> None:
    """Print the first lines of a run, its teachers, and, of several processes, each one's place."""
    from rlhf_trl.evaluation.progress import bars_of_data

    if args.process_index == 0:
        for line in lines:
            print(line, flush=True)
        for teacher in getattr(args, "teacher_models", None) or ():
            from rlhf_trl.run.folders import with_origin

            print(f"teacher: {with_origin(teacher)}", flush=True)
    bars_of_data(shown=args.process_index == 0 and not args.disable_tqdm)
    if args.world_size > 1:
        print(f"process {args.process_index} of {args.world_size} on {args.device}", flush=True)


def read(args: Any, load: Callable[..., Examples], config: Any, *options: Any) -> Examples:
    """Load what a `dataset:` block describes; print what was left out, and that prompts are texts.

    `load(config, *options)` does the loading; `config` is the block. The main process converts a
    file before the others, which then find its result in the cache.
    """
    reads_file = isinstance(config, FileData)
    with args.main_process_first(desc="reading data") if reads_file else nullcontext():
        data = load(config, *options)
    for reason, count in data.dropped.items():
        sides = f"{count} rows"
        held_out = data.dropped_held_out.get(reason)
        if held_out is not None:
            sides = f"{count} training and {held_out} held-out rows"
        if (count or held_out) and args.process_index == 0:
            print(f"left out {sides}: {reason}{data.first_places(reason)}", flush=True)
    for note in data.notes:
        if args.process_index == 0:
            print(note, flush=True)
    if not data.conversational and args.process_index == 0:
        print(OF_TEXTS, flush=True)
    return data


def build(
    loaded: Loaded[Any, Any], trainer_class: Any, data: Examples, tokenizer: Any, **arguments: Any
) -> Any:
    """Return a trainer with its data, and with panels of samples if the recipe has them.

    `arguments` are further ones of the trainer; they replace those that all trainers get.
    """
    check_held_out(loaded.trl, data.held_out)  # before the import, which may take seconds
    from trl import get_peft_config, get_quantization_config

    check_model(loaded)
    common = {
        "model": prepare_model(loaded.model, loaded.trl),
        "args": loaded.trl,
        "train_dataset": data.train,
        "eval_dataset": data.held_out,
        "processing_class": tokenizer,
        "peft_config": get_peft_config(loaded.model),
    }
    quantization = get_quantization_config(loaded.model)
    if quantization is not None:  # ORPOTrainer has no such argument, not even for None
        common["quantization_config"] = quantization
    reference_loading: AbstractContextManager[None] = nullcontext()
    if getattr(loaded.own, "reference_quantization", None):
        from rlhf_trl.run.quantized_reference import quantized_reference

        reference_loading = quantized_reference(loaded)
    # the trainer may load models: in `as_saved`, a model whose folder lacks weights is refused
    refusals = naming_refused_row(data, tokenizer, loaded.trl)
    with as_saved(common["model"]), reference_loading, refusals:
        trainer = trainer_class(**common | arguments)
    if not loaded.own.warmup_from_zero:  # as the book's code warms up
        from rlhf_trl.run.warmup import WarmupFromFirstStep

        trainer.add_callback(WarmupFromFirstStep(trainer.args))
    samples = getattr(loaded.own, "samples", None)
    if samples is not None and samples.every:
        from rlhf_trl.evaluation.samples import add_panels

        add_panels(trainer, samples, data.held_out or data.train)
    return trainer


def check_model(loaded: Loaded[Any, Any]) -> None:
    """Refuse a model that writes no answers, unless a reward model is made of it, and float16."""
    args, model, row = loaded.trl, loaded.model, loaded.row
    if model.model_name_or_path == UNTRAINED:  # built here, always a float32 language model
        return
    from rlhf_trl.policies import check_language_model, check_trainable

    check_trainable(model, args)
    if row is None or row.row.family != "reward_model":
        check_language_model(model, args)
        if model.use_peft and model.lora_task_type != "CAUSAL_LM":
            raise InputError(f"lora_task_type is {model.lora_task_type}, not CAUSAL_LM; remove it.")
    dtype = (args.model_init_kwargs or {}).get("dtype", model.dtype)
    if dtype == "auto":
        dtype = model_config(model, args).dtype
    if args.device.type == "cpu" and "float16" in str(dtype).split("."):
        raise InputError(
            "dtype is float16, in which models on a CPU lose what they know; write float32."
        )


def checksums(data: Examples) -> dict[str, int]:
    """Return a CRC-32 of the examples on each side, which are "train" and "held-out".

    It takes a second for 100 MB. The file and the order of buffers that hold the rows do not count.
    """
    sums: dict[str, int] = {}
    for side, rows in (("train", data.train), ("held-out", data.held_out)):
        for batch in rows.with_format("arrow").iter(1000) if rows else ():
            text = json.dumps(batch.to_pydict(), default=str)
            sums[side] = zlib.crc32(text.encode(), sums.get(side, 0))
    return sums


def check_template(data: Examples, tokenizer: Any, args: Any, config: Any) -> None:
    """Refuse a chat template that leaves out a text, and name tools: see `check_template_reads`."""
    if data.conversational:
        from rlhf_trl.run.chat_templates import check_template_reads

        check_template_reads(data, tokenizer, args, config)


@contextmanager
def naming_refused_row(data: Examples, tokenizer: Any, args: Any) -> Iterator[None]:
    """Name the row at which a chat template raises an exception of its own in the block."""
    try:
        yield
    except TemplateError:
        from rlhf_trl.run.chat_templates import check_refusals

        check_refusals(data, tokenizer, args)
        raise


def check_held_out(args: Any, rows: Any) -> None:
    """Stop if evaluation was asked for and there are no rows to evaluate on."""
    if not rows and args.eval_strategy != "no":
        raise InputError(
            f"eval_strategy is {args.eval_strategy.value}, but no row is held out; write no, or "
            "dataset.eval_size: 100, or name some with dataset.eval_path or dataset.eval_split."
        )


def names_the_key(train: Callable[..., None]) -> Callable[..., None]:
    """Decorate a function that does a whole run: what TRL refuses in it then names the key."""

    @wraps(train)
    def run_naming_keys(loaded: Loaded[Any, Any], *args: Any, **kwargs: Any) -> None:
        with naming([*vars(loaded.trl), *vars(loaded.model)]):
            train(loaded, *args, **kwargs)

    return run_naming_keys


def run(
    trainer: Any,
    loaded: Loaded[Any, Any],
    data: Examples,
    name: str,
    write_more: Callable[..., None] | None = None,
    prompts: Any = None,
) -> None:
    """Train, evaluate before, during and after, export the model and write the report.

    `<output_dir>` then holds `config.yaml` (the run, reproducible; `config-from-step-N.yaml` where
    it went on with other settings), `evaluations/`, `rollouts.sqlite`, `model/` (and
    `value_model/`), `log.json`, `learning_curve.png`, `summary.json` and the checkpoints. With
    `load_best_model_at_end`, the summary, the table and the last line tell of the step whose model
    is kept. Questions of the gym's tasks, if there are any, are answered in evaluation.

    Args:
        trainer: with its data.
        loaded: the config.
        data: the examples.
        name: what is trained, such as "grpo (chapter)".
        write_more: adds files of the recipe's own to the folder, on the main process; it takes
            trainer, folder and title.
        prompts: rows whose prompts the printed samples show, where `data` holds tokens, not texts.
    """
    folder = Path(trainer.args.output_dir)
    tasks = data.tasks if isinstance(trainer, AnswersHeldOut) else None  # reward models answer none
    if tasks is not None:
        from rlhf_trl.rewards.verifiers import task_metrics

        trainer.held_out, trainer.scores = tasks.held_out, task_metrics(tasks)
    launch.check_strategy(trainer, loaded.own.expect)  # the launch that the config asks for
    _describe_run(trainer, loaded, data, name)
    _open_record(trainer, loaded, data, name)
    if trainer.is_world_process_zero():
        _write_config(loaded, folder)
        if tasks is not None:
            print(
                f"held out: {len(tasks.held_out)} questions; {tasks.passed_over} of their kind "
                f"were kept out of the {len(tasks.train)} training rows",
                flush=True,
            )
    last_step, training_time = _train(trainer)
    kept_step = _evaluate_at_end(trainer, last_step)
    _export(trainer, folder)
    if trainer.is_world_process_zero():
        from rlhf_trl.run.finish import finish

        finish(
            trainer,
            loaded,
            data,
            name=name,
            last_step=last_step,
            kept_step=kept_step,
            training_time=training_time,
            write_more=write_more,
            prompts=prompts,
        )


def _can_evaluate(trainer: Any) -> bool:
    """Tell whether a trainer has anything held out: prompts to answer, or examples."""
    return bool(getattr(trainer, "held_out", ())) or trainer.eval_dataset is not None


def _describe_run(trainer: Any, loaded: Loaded[Any, Any], data: Examples, name: str) -> None:
    """Give a trainer the facts that each checkpoint keeps (`told`), and a file for evaluations.

    A run that goes on from a checkpoint is refused if its rows or its chat template are others.
    """
    args, folder = trainer.args, Path(trainer.args.output_dir)

    def write_evaluation(step: int, metrics: Any, answers: Any) -> None:
        content = {"metrics": metrics, "answers": answers}
        output.write_json(folder / "evaluations" / f"step-{step:06d}.json", content)

    trainer.on_answers = write_evaluation
    trainer.save_checksums = loaded.own.save_checksums  # of the files of a checkpoint
    template = json.dumps(trainer.processing_class.chat_template)
    facts: dict[str, Any] = {
        "given": loaded.given,
        "launch": launch.describe_launch(args, name, kind_of(args, loaded.row)),
        "versions": versions(),
    }
    if loaded.own.save_checksums:  # otherwise resuming does not check the rows
        facts["rows"] = checksums(data)
    facts["chat_template"] = sha256(template.encode()).hexdigest()
    if trainer.is_world_process_zero():
        from rlhf_trl.run.origins import made_from

        facts["made_from"] = made_from(args)  # the hashes that `begin` asked of this process alone
    trainer.told = facts
    if args.resume_from_checkpoint is not None:
        from rlhf_trl.run import resuming
        from rlhf_trl.run.intervals import IntervalsOfNow

        trainer.add_callback(IntervalsOfNow())
        resuming.check_rows(loaded, facts.get("rows", {}))
        resuming.check_template(loaded, facts["chat_template"])


def _open_record(trainer: Any, loaded: Loaded[Any, Any], data: Examples, name: str) -> None:
    """Give a trainer the record of its rollouts, unless the config wants none."""
    if loaded.own.rollouts == "off":
        return
    from rlhf_trl.rollouts.store import Store, right_answers

    facts = {"name": name, "seed": trainer.args.seed, **trainer.told}
    answers = right_answers(data.train, getattr(trainer, "held_out", None))
    trainer.rollouts = Store(trainer.args.output_dir, loaded.own.rollouts, facts, answers)


def _write_config(loaded: Loaded[Any, Any], folder: Path) -> None:
    """Write the config into the run's folder; move away what an earlier run left behind there."""
    from rlhf_trl.run import resuming

    if loaded.trl.resume_from_checkpoint is None:
        resuming.set_aside(folder, 0)
        loaded.save(folder / "config.yaml")
    else:
        resuming.keep_config(loaded, folder)


def _train(trainer: Any) -> tuple[int, Any]:
    """Train; return the last optimizer step, and the `TrainingTime`."""
    from rlhf_trl.run.training_time import TrainingTime

    args = trainer.args
    if not _can_evaluate(trainer):
        args.eval_on_start = False  # which transformers refuses without a data set
    trainer.add_callback(_StartOfTraining(trainer))
    trainer.add_callback(Watch())  # warns when nothing is learned
    if not args.disable_tqdm:
        from rlhf_trl.evaluation.progress import RewardProgress

        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(RewardProgress())
    training_time = TrainingTime(trainer, _can_evaluate(trainer))
    trainer.add_callback(training_time)
    stop = Stop(trainer)
    trainer.add_callback(stop)  # last, since it may end the run when all others have saved
    checkpoint_loading: AbstractContextManager[None] = nullcontext()
    if args.resume_from_checkpoint is not None or args.load_best_model_at_end:
        from rlhf_trl.run.tied_weights import tied_weights_are_no_news

        checkpoint_loading = tied_weights_are_no_news(trainer.model)  # drops a needless warning
    # `keeping` saves the last step boundary if an error ends the training
    with stop.keeping(), _naming_divergence(trainer), checkpoint_loading:
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if result.global_step == 0:
        raise InputError(
            "the run ended after 0 optimizer steps; raise max_steps, or give it more data."
        )
    return result.global_step, training_time


def _evaluate_at_end(trainer: Any, last_step: int) -> int:
    """Return the step whose model is kept; evaluate that model unless the last evaluation did."""
    log, kept_step = trainer.state.log_history, last_step
    best_checkpoint = trainer.state.best_model_checkpoint
    if trainer.args.load_best_model_at_end and best_checkpoint:
        kept_step = int(best_checkpoint.rpartition("-")[2])
        trainer.state.global_step = kept_step  # the evaluation below is of this step
    evaluated_steps = []
    for entry in log:
        if any(key.startswith("eval_") for key in entry):
            evaluated_steps.append(entry["step"])
    if _can_evaluate(trainer) and evaluated_steps[-1:] != [kept_step]:
        length = len(log)
        with _naming_divergence(trainer):
            trainer.evaluate()
        if kept_step in evaluated_steps:  # its evaluation in training is in the log already
            del log[length:]
    return kept_step


def _export(trainer: Any, folder: Path) -> None:
    """Close the record, and put the models in place; all processes take part."""
    from rlhf_trl.checkpoints import check_finite

    main_process = trainer.is_world_process_zero()
    check_finite(trainer)
    if trainer.rollouts is not None:
        trainer.rollouts.flush()
        trainer.rollouts.close()
    wait = trainer.accelerator.wait_for_everyone
    output.replace_folder(folder / "model", trainer.save_model, main_process, wait)
    if save_value_model := getattr(trainer, "save_value_model", None):
        output.replace_folder(folder / "value_model", save_value_model, main_process, wait)
    trainer.end()
