"""Going on from a checkpoint: what must not have changed since, and what is written anew."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_trl import manifests, output
from rlhf_trl.errors import InputError
from rlhf_trl.run.config import Loaded
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.differences import differences
from rlhf_trl.run.folders import last_config
from rlhf_trl.run.versions import versions

# Keys whose change makes a resumed run another one. Those of `NEVER` are always refused, those of
# `DECISIVE` unless `resume_changed` names them.
NEVER = {"model_name_or_path", "use_peft"}
DECISIVE = {
    "algorithm",
    "bf16",
    "data_seed",
    "dataset",
    "dtype",
    "formulation",
    "fp16",
    "generation_batch_size",
    "gradient_accumulation_steps",
    "max_samples",
    "num_generations",
    "num_iterations",
    "per_device_train_batch_size",
    "seed",
    "steps_per_generation",
    "world_size",
}
RESUMING = ("resume_from_checkpoint", "resume_changed")  # fields about resuming, not about the run
LENGTH = {"max_steps", "num_train_epochs"}  # how long a run is: a finished one may be made longer


def check_resume(loaded: Loaded[Any, Any], checkpoint: str) -> None:
    """Refuse to go on where the run would not be the same one; say what else changed."""
    args, step = loaded.trl, manifests.step_of(checkpoint)
    if 0 < args.max_steps < step:
        raise InputError(
            f"resume_from_checkpoint: {checkpoint} is at step {step} of max_steps "
            f"{args.max_steps}, so there is nothing left to train; raise max_steps to go on."
        )
    print(f"resuming from {checkpoint}", flush=True)
    manifest = manifests.read_manifest(checkpoint)
    meant_to_change = loaded.own.resume_changed
    # by key, its value before and now; what an older manifest does not hold counts as unchanged
    changed = changed_fields(loaded, manifest.get("given", loaded.given))
    versions_before = manifest.get("versions", {})
    for library, now in versions().items():
        before = versions_before.get(library, now)
        if before != now:
            changed[library] = before, now
    if manifest["world_size"] != args.world_size:
        changed["world_size"] = manifest["world_size"], args.world_size
    for key, (old, new) in changed.items():
        effect = ", which changes the schedule of the learning rate" if key in LENGTH else ""
        print(f"changed since {Path(checkpoint).name}: {key}: {old} -> {new}{effect}", flush=True)
        name = key.partition(".")[0]  # of a key in a block, that of the block
        if name in NEVER or (name in DECISIVE and name not in meant_to_change):
            remedy = "" if name in NEVER else f"write resume_changed: [{name}] if it is meant, or "
            raise InputError(
                f"resume_from_checkpoint: {key} was {old} and is now {new}, so the run would not "
                f"be the same one; restore it, {remedy}start a new run in another output_dir."
            )
    if "world_size" in changed or getattr(args, "use_vllm", False):
        cause = "another number of processes" if "world_size" in changed else "vLLM"
        print(f"with {cause}, it cannot go on exactly as it would have", flush=True)


def is_evaluated(args: Any, step: int, evaluated: Mapping[int, Path]) -> bool:
    """Return whether nothing is left to evaluate at the step of a checkpoint.

    A run that failed may have saved the checkpoint before the evaluation of its step.
    """
    due = args.eval_strategy == "steps" and args.eval_steps >= 1 and step % args.eval_steps == 0
    return step in evaluated if due else any(before <= step for before in evaluated)


def steps_left(loaded: Loaded[Any, Any], checkpoint: str | None) -> bool:
    """Tell whether there are steps to train after a checkpoint, or beyond a finished run."""
    args, folder = loaded.trl, Path(loaded.trl.output_dir)
    if checkpoint is None:  # a finished run that kept none cannot be made longer
        longer = changed_fields(loaded, read_config(folder / "config.yaml")).keys() & LENGTH
        if longer:
            raise InputError(
                f"resume_from_checkpoint: {str(folder)!r} holds a finished run and no checkpoint "
                f"for another {min(longer)}; write elsewhere with --output_dir."
            )
        return False
    state = json.loads(Path(checkpoint, "trainer_state.json").read_text())
    if args.max_steps > 0:
        return state["global_step"] < args.max_steps
    # num_train_epochs decides: the checkpoint has the number of steps that it came to then, and
    # another one now may come to more
    before = manifests.read_manifest(checkpoint).get("given", loaded.given)
    longer = changed_fields(loaded, before).keys() & LENGTH
    return state["global_step"] < state["max_steps"] or bool(longer)


def check_template(loaded: Loaded[Any, Any], digest: str) -> None:
    """Refuse a checkpoint that was trained with another chat template than that of this hash."""
    checkpoint = loaded.trl.resume_from_checkpoint
    before = manifests.read_manifest(checkpoint).get("chat_template", digest)
    if before != digest and "chat_template_path" not in loaded.own.resume_changed:
        raise InputError(
            f"resume_from_checkpoint: the chat template is not that of {checkpoint}; restore it, "
            "write resume_changed: [chat_template_path] if it is meant, or start in another "
            "output_dir."
        )


def check_rows(loaded: Loaded[Any, Any], checksums: Mapping[str, int]) -> None:
    """Refuse a checkpoint that was made with other examples than those of these checksums."""
    checkpoint = loaded.trl.resume_from_checkpoint
    before = manifests.read_manifest(checkpoint).get("rows", checksums)
    changed = " and ".join(side for side in checksums if checksums[side] != before.get(side))
    if changed and "dataset" not in loaded.own.resume_changed:
        raise InputError(
            f"resume_from_checkpoint: the {changed} rows are not those of {checkpoint}; restore "
            "them, write resume_changed: [dataset] if it is meant, or start in another output_dir."
        )


def changed_fields(loaded: Loaded[Any, Any], before: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what a run was given before and what is given now, where the two differ."""
    old = json.loads(json.dumps(before, default=str))  # as a manifest holds it
    new = json.loads(json.dumps(loaded.given, default=str))
    return {key: pair for key, pair in differences(old, new).items() if key not in RESUMING}


def keep_config(loaded: Loaded[Any, Any], folder: Path) -> None:
    """Set aside what was written after the checkpoint; keep what the run is given from there on."""
    config, checkpoint = folder / "config.yaml", loaded.trl.resume_from_checkpoint
    if steps_left(loaded, checkpoint):
        set_aside(folder, manifests.step_of(checkpoint))
    if not config.exists():
        loaded.save(config)
    elif changed_fields(loaded, read_config(last_config(folder))):
        loaded.save(folder / f"config-from-step-{manifests.step_of(checkpoint)}.yaml")


def set_aside(folder: Path, step: int) -> None:
    """Move what a run wrote after `step`, from which it resumes now, to its folder `earlier-N`.

    Then old results and later checkpoints are not mistaken for those of the resumed run.
    """
    later = _written_after(folder, step)
    if not later:
        return
    went_back = any((path / output.MANIFEST).exists() for path in later)  # to an older checkpoint
    aside = folder / f"earlier-{max(output.numbered(folder, 'earlier-'), default=0) + 1}"
    for path in later:
        target = aside / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
    to_copy = [folder / "config.yaml"]
    # Resuming deletes rollouts after `step` from the record. They are a few after a kill, and are
    # made again; but they may be many if the user went back: then a copy keeps them.
    if went_back:
        to_copy += folder.glob(f"{output.RECORD}*")
    for path in to_copy:
        if path.exists():
            shutil.copy(path, aside)
    print(f"what this run left after step {step} before is now in {aside}", flush=True)


def _written_after(folder: Path, step: int) -> list[Path]:
    """Return what a run wrote after a step, and at its end."""
    later = []
    for prefix in output.BY_STEP.split():
        for number, path in output.numbered(folder, prefix).items():
            # config-from-step-N.yaml is written after step N, everything else numbered N before
            if number > step or (number == step and path.suffix == ".yaml"):
                later.append(path)
    at_end = [folder / name for name in output.AT_END.split()]
    return later + [path for path in at_end if path.exists()]
