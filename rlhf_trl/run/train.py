"""One run from trainer to report: train or resume, evaluate, export, summarize."""

import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from datasets import disable_progress_bars
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, ProgressCallback

from rlhf_trl import output
from rlhf_trl.algorithms import nearest_row
from rlhf_trl.data.arrow import cells
from rlhf_trl.data.blocks import FileData
from rlhf_trl.data.examples import Examples
from rlhf_trl.data.prompt_keys import fingerprint, prompt_key
from rlhf_trl.data.prompts import load_prompts
from rlhf_trl.errors import InputError, naming
from rlhf_trl.evaluation import report
from rlhf_trl.evaluation.held_out import PENALTIES, WITH_PENALTIES, AnswersHeldOut
from rlhf_trl.evaluation.samples import add_panels
from rlhf_trl.models import load_quietly, load_tokenizer, prepare_model
from rlhf_trl.rewards.loading import (
    answer_columns,
    check_all_rewarded,
    check_right_answers,
    load_rewards,
)
from rlhf_trl.rewards.verifiers import task_metrics
from rlhf_trl.rollouts.generate import check_prompts
from rlhf_trl.rollouts.store import Store
from rlhf_trl.run import launch
from rlhf_trl.run.chat_templates import check_template_reads
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.differences import differences
from rlhf_trl.run.folders import model_folder
from rlhf_trl.run.seen import examples_seen, kind_of

# What makes a resumed run another one: refused, but for what `resume_changed` names.
NEVER = {"model_name_or_path", "use_peft"}
DECISIVE = {
    *("seed", "data_seed", "dataset", "max_samples", "world_size", "bf16", "fp16", "dtype"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size"),
    *("steps_per_generation", "num_generations", "num_iterations", "algorithm", "formulation"),
}
RESUMING = ("resume_from_checkpoint", "resume_changed")
LENGTH = {"max_steps", "num_train_epochs"}
TRACKERS = ("tensorboard", "trackio", "wandb")  # each an extra of this package


class _WrapperGuard(TrainerCallback):
    def __init__(self, trainer: Any):
        self._trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        launch.check_wrapper(self._trainer)
        if (record := self._trainer.rollouts) is not None and state.is_world_process_zero:
            carried = getattr(self._trainer, "_carried", {})
            record.rewind(state.global_step, carried.get("generation", 0))


class TrainingTime(TrainerCallback, ExportableState):
    """Seconds of training up to now, with those before the checkpoint that a run goes on from.

    Checkpoints hold them: in `trainer_state.json`, as transformers keeps what callbacks know.
    """

    def __init__(self, checkpoint: str | None):
        self._before = {"seconds": 0.0, "cpu_seconds": 0.0}
        if checkpoint is not None:
            state = json.loads(Path(checkpoint, "trainer_state.json").read_text())
            kept = state["stateful_callbacks"].get(type(self).__name__, {})
            self._before |= kept.get("attributes", {})
        self._started = time.time()
        self._cpu_started = time.process_time()

    def so_far(self) -> dict[str, float]:
        """Return the `seconds` and this process's `cpu_seconds`."""
        return {
            "seconds": self._before["seconds"] + time.time() - self._started,
            "cpu_seconds": self._before["cpu_seconds"] + time.process_time() - self._cpu_started,
        }

    def state(self) -> dict[str, dict[str, float]]:
        """Return what a checkpoint keeps."""
        return {"args": {}, "attributes": self.so_far()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take a place in the state, which one of a checkpoint of an earlier version lacks."""
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())


@contextmanager
def _tied_weights_are_no_news(model: Any) -> Iterator[None]:
    """Drop the warning of transformers that a checkpoint lacks exactly the tied weights.

    They are saved once, under the name of the weight that they are tied to.
    """
    tied = [*(getattr(model, "all_tied_weights_keys", None) or ())]
    warning = f"There were missing keys in the checkpoint model loaded: {tied}."
    logger = logging.getLogger("transformers.trainer")

    def is_news(record: logging.LogRecord) -> bool:
        return record.getMessage() != warning

    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


def begin(loaded: Any, name: str) -> None:
    """Check the launch, claim the output folder, find the checkpoint, say what is about to run.

    Of a stage that trains nothing, only its own `output_dir` is claimed, and its config kept there.
    """
    _find_models(loaded)
    if loaded.trl is None:
        output.claim(loaded.own.output_dir, None)
        print(name, flush=True)
        loaded.save(Path(loaded.own.output_dir, "config.yaml"))
        return
    args, folder = loaded.trl, Path(loaded.trl.output_dir)
    launch.check_processes(args, loaded.own.expect)
    first_line = launch.describe_launch(args, name, kind_of(args, loaded.row))
    if args.max_steps == 0:
        raise InputError("max_steps is 0, which trains nothing; write 1 or more.")
    if args.max_steps < -1:
        raise InputError(
            f"max_steps is {args.max_steps}; write 1 or more, or -1 to train for num_train_epochs."
        )
    for tracker in args.report_to:
        if tracker in TRACKERS and find_spec(tracker) is None:
            raise InputError(
                f"report_to: {tracker} is missing; run scripts/setup.sh {tracker} or write none."
            )
    for key in ("ignore_data_skip", "enable_jit_checkpoint"):
        if getattr(args, key):
            raise InputError(f"{key}: a run resumed with it would not be the same one; remove it.")
    main_process = args.process_index == 0
    # checkpoint, whether it was evaluated before, refusal, what to say of a finished run
    found: list[Any] = [None, False, None, None]
    if main_process:
        try:
            found[0] = checkpoint = output.claim(str(folder), args.resume_from_checkpoint)
            if checkpoint is not None:
                step = output.step_of(checkpoint)
                _check_resume(loaded, checkpoint)
                found[1] = any(n <= step for n in output.numbered(folder, "evaluations/step-"))
            if output.finished(folder) and not _left(loaded, checkpoint):
                remedy = "raise max_steps to go on" if checkpoint else "name another --output_dir"
                found[3] = f"{folder} holds a finished run; {remedy}."
        except InputError as error:
            found[2] = str(error)
    args.resume_from_checkpoint, evaluated, refusal, finished = broadcast_object_list(found)
    if refusal is not None:  # on every process, or the others would wait for this one
        raise InputError(refusal)
    if finished is not None:
        if main_process:
            print(finished, flush=True)
        raise SystemExit(0)
    # What a tracker is told by config must not be overruled by transformers' own default.
    os.environ.setdefault("WANDB_PROJECT", args.project)
    args.run_name = os.environ.get("WANDB_RUN_NAME", args.run_name)
    if "eval_on_start" not in loaded.given:
        args.eval_on_start = not evaluated
    if "logging_first_step" not in loaded.given:
        args.logging_first_step = True
    load_quietly()
    if main_process:
        print(first_line, flush=True)
        if note := on_policy_note(loaded):
            print(note, flush=True)
        for teacher in getattr(args, "teacher_models", None) or ():
            print(f"teacher: {report.told_of(teacher)}", flush=True)
    else:
        disable_progress_bars()
    if args.world_size > 1:
        print(f"process {args.process_index} of {args.world_size} on {args.device}", flush=True)


def _find_models(loaded: Any) -> None:
    """Name the folders of the reward model and the teachers, or say which one does not exist."""
    own, args = loaded.own, loaded.trl
    if reward_model := getattr(own, "reward_model", None):
        own.reward_model = model_folder("reward_model", reward_model)
    if teachers := getattr(args, "teacher_models", None):
        args.teacher_models = [model_folder("teacher_models", name) for name in teachers]


def on_policy_note(loaded: Any) -> str | None:
    """Say what of an algorithm does nothing in a run whose ratios never leave 1; None: all acts.

    TRL takes the log-probabilities of the update itself for the old ones where a generation ends
    with an accumulation window.
    """
    args = loaded.trl
    if loaded.row is None or not hasattr(args, "steps_per_generation"):
        return None
    if args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations):
        return None
    name = loaded.row.algorithm
    near = nearest_row(name, loaded.row.formulation)
    if near is None or not near.inactive_at_ratio_1:
        return None
    start = "one update per generation: every ratio is 1, so"
    if near.same_at_ratio_1:
        return f"{start} {name} is {near.name} here; num_iterations 2 tells them apart"
    idle = " and ".join(near.inactive_at_ratio_1)
    rest = [part for part in near.differs_in if part not in near.inactive_at_ratio_1]
    return (
        f"{start} {name} differs from {near.name} in {', '.join(rest)} only, not in {idle}; "
        "num_iterations 2 brings that in"
    )


def _left(loaded: Any, checkpoint: str | None) -> bool:
    """Return whether there are steps to train after a checkpoint, or beyond a finished run."""
    args, folder = loaded.trl, Path(loaded.trl.output_dir)
    if checkpoint is None:
        longer = _changed(loaded, read_config(folder / "config.yaml")).keys() & LENGTH
        if longer:
            raise InputError(
                f"resume_from_checkpoint: {str(folder)!r} holds a finished run and no checkpoint "
                f"for another {min(longer)}; write elsewhere with --output_dir."
            )
        return False
    state = json.loads(Path(checkpoint, "trainer_state.json").read_text())
    if args.max_steps > 0:
        return state["global_step"] < args.max_steps
    before = output.read_manifest(checkpoint).get("given", loaded.given)
    longer = _changed(loaded, before).keys() & LENGTH
    return state["global_step"] < state["max_steps"] or bool(longer)


def _check_resume(loaded: Any, checkpoint: str) -> None:
    """Refuse to go on where the run would not be the same one; say what else changed."""
    args, step = loaded.trl, output.step_of(checkpoint)
    if 0 < args.max_steps < step:
        raise InputError(
            f"resume_from_checkpoint: {checkpoint} is at step {step} of max_steps "
            f"{args.max_steps}, so there is nothing left to train; raise max_steps to go on."
        )
    print(f"resuming from {checkpoint}", flush=True)
    manifest, allowed = output.read_manifest(checkpoint), loaded.own.resume_changed
    changed = _changed(loaded, manifest.get("given", loaded.given))
    for library, now in report.versions().items():
        if (before := manifest.get("versions", {}).get(library, now)) != now:
            changed[library] = before, now
    if manifest["world_size"] != args.world_size:
        changed["world_size"] = manifest["world_size"], args.world_size
    for key, (old, new) in changed.items():
        so = ", which changes the schedule of the learning rate" if key in LENGTH else ""
        print(f"changed since {Path(checkpoint).name}: {key}: {old} -> {new}{so}", flush=True)
        name = key.partition(".")[0]
        if name in NEVER or (name in DECISIVE and name not in allowed):
            remedy = "" if name in NEVER else f"write resume_changed: [{name}] if it is meant, or "
            raise InputError(
                f"resume_from_checkpoint: {key} was {old} and is now {new}, so the run would not "
                f"be the same one; restore it, {remedy}start a new run in another output_dir."
            )
    if "world_size" in changed or getattr(args, "use_vllm", False):
        cause = "another number of processes" if "world_size" in changed else "vLLM"
        print(f"with {cause}, it cannot go on exactly as it would have", flush=True)


def _check_template(loaded: Any, template: Any) -> str:
    """Return a hash of the chat template; refuse a checkpoint that was trained with another."""
    checkpoint = loaded.trl.resume_from_checkpoint
    now = sha256(json.dumps(template).encode()).hexdigest()
    before = output.read_manifest(checkpoint).get("chat_template", now) if checkpoint else now
    if before != now and "chat_template_path" not in loaded.own.resume_changed:
        raise InputError(
            f"resume_from_checkpoint: the chat template is not that of {checkpoint}; restore it, "
            "write resume_changed: [chat_template_path] if it is meant, or start in another "
            "output_dir."
        )
    return now


def _check_rows(loaded: Any, data: Examples) -> dict[str, int]:
    """Return a CRC-32 of the examples on each side; refuse a checkpoint made with other examples.

    It takes a second for 100 MB. The file and the order of buffers that hold the rows do not count.
    """
    checkpoint, found = loaded.trl.resume_from_checkpoint, {}
    for side, rows in (("train", data.train), ("held-out", data.held_out)):
        for batch in rows.with_format("arrow").iter(1000) if rows else ():
            text = json.dumps(batch.to_pydict(), default=str)
            found[side] = zlib.crc32(text.encode(), found.get(side, 0))
    before = output.read_manifest(checkpoint).get("rows", found) if checkpoint else found
    changed = " and ".join(side for side in found if found[side] != before.get(side))
    if changed and "dataset" not in loaded.own.resume_changed:
        raise InputError(
            f"resume_from_checkpoint: the {changed} rows are not those of {checkpoint}; restore "
            "them, write resume_changed: [dataset] if it is meant, or start in another output_dir."
        )
    return found


def _changed(loaded: Any, before: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what a run was given before and what is given now, where the two differ."""
    # as a manifest holds them
    old, new = (json.loads(json.dumps(given, default=str)) for given in (before, loaded.given))
    return {k: v for k, v in differences(old, new).items() if k not in RESUMING}


def _keep_config(loaded: Any, folder: Path) -> None:
    """Write what a new run, or one that goes on with other settings, is given."""
    config, checkpoint = folder / "config.yaml", loaded.trl.resume_from_checkpoint
    if checkpoint is None:
        output.set_aside(folder, 0)
        loaded.save(config)
        return
    if _left(loaded, checkpoint):
        output.set_aside(folder, output.step_of(checkpoint))
    if not config.exists():
        loaded.save(config)
    elif _changed(loaded, read_config(config)):
        loaded.save(folder / f"config-from-step-{output.step_of(checkpoint)}.yaml")


def read(args: Any, load: Callable[..., Examples], config: Any, *options: Any) -> Examples:
    """Load what a `dataset:` block describes; print what was left out, and that prompts are texts.

    The main process converts a file before the others, which then find what it kept.
    """
    files = isinstance(config, FileData)
    with args.main_process_first(desc="reading data") if files else nullcontext():
        data = load(config, *options)
    for reason, count in data.dropped.items():
        sides = f"{count} rows"
        held_out = data.dropped_held_out.get(reason)
        if held_out is not None:
            sides = f"{count} training and {held_out} held-out rows"
        if (count or held_out) and args.process_index == 0:
            print(f"left out {sides}: {reason}", flush=True)
    for note in data.notes:
        if args.process_index == 0:
            print(note, flush=True)
    if not data.conversational and args.process_index == 0:
        print("prompts are texts: no chat template is applied (messages get it)", flush=True)
    return data


def build(loaded: Any, trainer_class: Any, data: Examples, tokenizer: Any, **arguments: Any) -> Any:
    """Return a trainer with its data, and with panels of samples if the recipe has them."""
    check_held_out(loaded.trl, data.held_out)
    from trl import get_peft_config, get_quantization_config

    quantization = get_quantization_config(loaded.model)
    given = {
        "model": prepare_model(loaded.model, loaded.trl),
        "args": loaded.trl,
        "train_dataset": data.train,
        "eval_dataset": data.held_out,
        "processing_class": tokenizer,
        "peft_config": get_peft_config(loaded.model),
        # ORPOTrainer takes none
        **({} if quantization is None else {"quantization_config": quantization}),
    }
    trainer = trainer_class(**given | arguments)
    if samples := getattr(loaded.own, "samples", None):
        add_panels(trainer, samples, data.held_out or data.train)
    return trainer


def load_reward_functions(own: Any, args: Any, data: Examples, tokenizer: Any) -> list[Any]:
    """Return all reward functions that a config names, each with a name and weight of its own."""
    if not hasattr(own, "reward_funcs"):
        return []
    rewards = []
    if own.reward_funcs or not own.reward_model:
        rewards += load_rewards(own.reward_funcs, data.tasks, data.train.column_names)
        check_right_answers(own.reward_funcs, data.train, data.held_out)
        if not own.reward_model:
            check_all_rewarded(own.reward_funcs, data.train)
    if own.reward_model:
        from rlhf_trl.rewards.from_model import load_reward_model

        how = (own.reward_aggregate, own.reward_model_strips_think)
        path = model_folder("reward_model", own.reward_model)
        rewards.append(load_reward_model(path, tokenizer, args, *how))
    names = [function.__name__ for function in rewards]
    taken = {"length", "cut_off", *PENALTIES, WITH_PENALTIES}
    if len(names) > 1:
        taken.add("reward")
    if again := [name for n, name in enumerate(names) if name in taken.union(names[:n])]:
        raise InputError(
            f"reward_funcs: {again[0]!r} is what logs call another number; rename the function."
        )
    weights = getattr(args, "reward_weights", None)  # rejection sampling has none
    if weights is not None and len(weights) != len(rewards):
        raise InputError(
            f"reward_weights: {len(weights)} for {len(rewards)} reward_funcs; write one for each."
        )
    return rewards


def right_answers(*sides: Any) -> Iterator[tuple[Any, str]]:
    """Yield prompt and right answer of all rows that have both."""
    for rows in filter(None, sides):
        if {"prompt", "answer"} <= rows[0].keys():
            pairs = ((row["prompt"], row["answer"]) for row in rows)
            yield from ((prompt, str(answer)) for prompt, answer in pairs if answer is not None)


def a_run(train: Callable[..., None]) -> Callable[..., None]:
    """Decorate what does a whole run, so that what TRL refuses in it names the key."""

    @wraps(train)
    def named(loaded: Any, *args: Any, **kwargs: Any) -> None:
        with naming([*vars(loaded.trl), *vars(loaded.model)]):
            train(loaded, *args, **kwargs)

    return named


@a_run
def train_policy(loaded: Any, trainer_class: Any) -> None:
    """Do what every policy-gradient recipe does: load, train, evaluate, save, report."""
    own, args, model = loaded.own, loaded.trl, loaded.model
    begin(loaded, loaded.row.label)
    check_reward_model(own)
    data = read(args, load_prompts, own.dataset, answer_columns(own))
    if isinstance(own.dataset, FileData):
        from rlhf_trl.data.columns import check_unread

        check_unread(data.train.column_names, own.dataset.path)
    check_generation_batch(args, data.train)
    check_held_out(args, data.held_out)  # before a reward model is loaded
    tokenizer = load_tokenizer(model, args, data.conversational)
    check_template_reads(data, tokenizer, args, own.dataset)
    rewards = load_reward_functions(own, args, data, tokenizer)
    for rows in (data.train, data.held_out or []):
        check_prompts(rows, tokenizer, model, args)
    trainer = build(loaded, trainer_class, data, tokenizer, reward_funcs=rewards)
    if data.tasks is None and data.held_out is not None:
        trainer.held_out, trainer.scores = data.held_out.to_list(), {}
    run(trainer, loaded, data, loaded.row.label)


def check_held_out(args: Any, rows: Any) -> None:
    """Stop if evaluation was asked for and there are no rows to evaluate on."""
    if not rows and args.eval_strategy != "no":
        raise InputError(
            f"eval_strategy is {args.eval_strategy.value}, but no row is held out; write no, or "
            "dataset.eval_size: 100, or name some with dataset.eval_path or dataset.eval_split."
        )


def fix(loaded: Any, values: Mapping[str, Any], by: str) -> None:
    """Set fields of TRL that something decides; refuse a config that says otherwise."""
    for key, value in values.items():
        if loaded.given.get(key) not in (None, value):
            given = str(loaded.given[key]).lower()
            raise InputError(f"{key}: {given} contradicts {by}; remove {key}.")
        setattr(loaded.trl, key, value)


def check_reward_model(own: Any) -> None:
    """Refuse what only a reward model would read, where there is none."""
    for key in ("reward_aggregate", "reward_model_strips_think"):
        if (value := getattr(own, key)) and not own.reward_model:
            told = f"{key} is {str(value).lower()}, but there is no reward_model"
            raise InputError(f"{told}; name one.")


def check_generation_batch(args: Any, rows: Any) -> None:
    """Stop unless the data set fills at least one generation batch; TRL would train 0 steps."""
    prompts = args.generation_batch_size // args.num_generations
    if len(rows) < prompts:
        raise InputError(
            f"dataset: {len(rows)} rows are fewer than the {prompts} prompts of a generation batch "
            f"({args.generation_batch_size} / {args.num_generations}); add rows or make it smaller."
        )


def _questions(data: Examples) -> set[str]:
    """Return the keys of the held-out prompts, those of the gym where a run has its tasks."""
    if data.tasks is not None:
        return {prompt_key(row["prompt"]) for row in data.tasks.held_out}
    if data.held_out is None:
        return set()
    return {prompt_key(prompt) for prompt in cells(data.held_out, "prompt")}


def _prompt_to_show(held_out: Sequence[Mapping[str, Any]], rows: Any) -> Any:
    """Return a prompt of the form that a run trains on: messages, which get a template, or a text.

    It is one that was answered in evaluation, or of `rows`, whose messages may be long.
    """
    if held_out:
        return held_out[0]["prompt"]
    prompt = rows[0]["prompt"]
    return prompt if isinstance(prompt, str) else [{"role": "user", "content": "Hello"}]


def run(
    trainer: Any,
    loaded: Any,
    data: Examples,
    name: str,
    extra: Callable[..., None] | None = None,
    prompts: Any = None,
) -> None:
    """Train, evaluate before, during and after, export the model and write the report.

    `<output_dir>` then holds `config.yaml` (the run, reproducible; `config-from-step-N.yaml` where
    it went on with other settings), `evaluations/`, `rollouts.sqlite`, `model/` (and
    `value_model/`), `log.json`, `learning_curve.png`, `summary.json` and the checkpoints. With
    `load_best_model_at_end`, the summary, the table and the last line tell of the step whose model
    is kept. Questions of the gym's tasks, if there are any, are answered in evaluation. `extra`
    writes what else the main process knows; it takes trainer, folder and title. `prompts` are rows
    with those of the answers where the training rows hold tokens alone.
    """
    args, folder = trainer.args, Path(trainer.args.output_dir)
    tasks = data.tasks if isinstance(trainer, AnswersHeldOut) else None
    if tasks is not None:
        trainer.held_out, trainer.scores = tasks.held_out, task_metrics(tasks)
    held_out = getattr(trainer, "held_out", ())
    can_evaluate = bool(held_out) or trainer.eval_dataset is not None
    args.eval_on_start &= can_evaluate
    launch.check_strategy(trainer, loaded.own.expect)
    trainer.on_answers = lambda step, metrics, answers: output.write_json(
        folder / "evaluations" / f"step-{step:06d}.json", {"metrics": metrics, "answers": answers}
    )
    trainer.save_checksums = loaded.own.save_checksums
    trainer.told = {
        "given": loaded.given,
        "launch": launch.describe_launch(args, name, kind_of(args, loaded.row)),
        "versions": report.versions(),
        **({"rows": _check_rows(loaded, data)} if loaded.own.save_checksums else {}),
        "chat_template": _check_template(loaded, trainer.processing_class.chat_template),
    }
    if loaded.own.rollouts != "off":
        facts = {"name": name, "seed": args.seed, **trainer.told}
        answers = right_answers(data.train, getattr(trainer, "held_out", None))
        trainer.rollouts = Store(folder, loaded.own.rollouts, facts, answers)
    trainer.add_callback(_WrapperGuard(trainer))
    trainer.add_callback(report.Watch())
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(report.RewardProgress())

    if trainer.is_world_process_zero():
        _keep_config(loaded, folder)
        if tasks is not None:
            print(
                f"held out: {len(tasks.held_out)} questions; {tasks.passed_over} of their kind "
                f"were kept out of the {len(tasks.train)} training rows",
                flush=True,
            )
    training_time = TrainingTime(args.resume_from_checkpoint)
    trainer.add_callback(training_time)
    try:
        with _tied_weights_are_no_news(trainer.model):
            result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise InputError(
            f"the model's probabilities are no longer numbers at step "
            f"{trainer.state.global_step}: training has diverged; {trainer.last_good()}."
        ) from error
    trained = training_time.so_far()
    if result.global_step == 0:
        raise InputError(
            "the run ended after 0 optimizer steps; raise max_steps, or give it more data."
        )
    log, kept = trainer.state.log_history, result.global_step
    if args.load_best_model_at_end and (best := trainer.state.best_model_checkpoint):
        kept = trainer.state.global_step = int(best.rpartition("-")[2])
    evaluated = [e["step"] for e in log if any(key.startswith("eval_") for key in e)]
    if can_evaluate and (not evaluated or evaluated[-1] != kept):
        logged = len(log)
        trainer.evaluate()
        if kept in evaluated:  # it is in the log, in its place
            del log[logged:]

    main_process = trainer.is_world_process_zero()
    trainer.check_finite()
    if trainer.rollouts is not None:
        trainer.rollouts.flush()
        trainer.rollouts.close()
    wait = trainer.accelerator.wait_for_everyone
    output.replace_folder(folder / "model", trainer.save_model, main_process, wait)
    if save := getattr(trainer, "save_value_model", None):
        output.replace_folder(folder / "value_model", save, main_process, wait)
    trainer.end()
    if not main_process:
        return
    questions = _questions(data)
    seen, kind = examples_seen(trainer, data.train, kept)
    evaluations = report.read_evaluations(folder / "evaluations")
    until = {step: each for step, each in evaluations.items() if step <= kept}
    output.write_json(folder / "log.json", log)
    output.write_json(
        folder / "summary.json",
        {
            "name": name,
            "seed": args.seed,
            "steps": result.global_step,
            "model_step": kept,
            "seen": seen,
            "seen_kind": kind,
            "processes": args.world_size,
            "held_out": len(held_out or data.held_out or ()),
            "questions": len(questions),
            "questions_fingerprint": fingerprint(questions),
            "passed_over": data.tasks.passed_over if data.tasks is not None else 0,
            "before": until[min(until)]["metrics"] if len(until) > 1 else {},
            "after": until[max(until)]["metrics"] if until else {},
            "train_seconds": round(trained["seconds"], 2),
            "train_cpu_seconds": round(trained["cpu_seconds"], 2),
            "versions": report.versions(),
        },
    )
    names = {row["task"] for row in tasks.held_out} if tasks is not None else set()
    title = ", ".join([name, *(["+".join(sorted(names))] if names else []), f"seed {args.seed}"])
    if extra is not None:
        extra(trainer, folder, title)
    report.learning_curve(folder / "learning_curve.png", log, evaluations, title)
    if told := until or report.training_metrics(log):
        print(f"\n{report.table(told)}")
    if args.load_best_model_at_end:
        print(f"\nload_best_model_at_end: model/ is that of step {kept} of {result.global_step}")
    for sentence in report.untaught(log, folder):
        print(f"\n{sentence}")
    shown, model, last = os.path.relpath(folder), loaded.model, result.global_step
    print(f"\nseen in training: {seen} {kind}")
    print(f"model, learning curve and summary are in {shown}")
    rows = data.held_out or prompts or data.train
    prompt = None if hasattr(trainer, "reader") else _prompt_to_show(held_out, rows)
    print(report.next_steps(shown, model.model_name_or_path, last, prompt, model.use_peft))
    print(report.headline(told, names, args.seed), flush=True)
