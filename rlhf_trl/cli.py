"""The `rlhf-trl` command; each subcommand is a few lines over the package."""

import argparse
import gc
import importlib.metadata
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rlhf_trl.errors import InputError, end, nearest, refuse_repeated, takes_traceback


def main(argv: Sequence[str] | None = None) -> None:
    """Run `rlhf-trl`; an `InputError` ends it with its sentence and exit code 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    with_traceback = takes_traceback(words)
    parser = argparse.ArgumentParser(prog="rlhf-trl", allow_abbrev=False)
    help_of_traceback = "with any command: show where an error comes from"
    parser.add_argument("--traceback", action="store_true", help=help_of_traceback)
    of = importlib.metadata.version
    versions = f"rlhf_trl {of('rlhf_trl')}, TRL {of('trl')}"
    parser.add_argument("--version", action="version", version=versions)
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, run: Callable[..., None], help: str, epilog: str = "") -> Any:
        found = commands.add_parser(name, help=help, epilog=epilog, allow_abbrev=False)
        found.set_defaults(run=run)
        return found.add_argument

    option = add("algorithms", _algorithms, "the table of algorithms, or those named")
    option("names", nargs="*", metavar="NAME", help="explain it, or several side by side")
    option("--json", action="store_true", help="the same for programs")
    option = add("drift", _drift, "what moved in the installed TRL; exit code 1 if so")
    option("--json", action="store_true", help="the same for programs")
    option("--record", metavar="PATH", help="write the installed surface there instead")
    option("--overwrite", action="store_true", help="let --record replace a file")
    about = "Every other option goes to the recipe, as in --max_steps 200."
    race = option = add("race", _race, "train algorithms side by side: table and figure", about)
    about = "names of rows or of our configs in configs/tiny, separated by commas"
    option("--algorithms", required=True, help=about)
    option("--config", help="one config for all, instead of configs/tiny/NAME.yaml")
    about = "one update per generation; by default two (num_iterations 2), since with one no ratio "
    option("--on_policy", action="store_true", help=f"{about}leaves 1 and most losses coincide")
    about = "reward models side by side: how often the candidate that each would choose is right"
    more = "Reads the scores.jsonl of each run; all must have scored the same candidates."
    option = add("best-of-n", _best_of_n, about, more)
    option("runs", nargs="+", metavar="RUN", help="folder of a reward model run")
    about = "each RUN holds seed-* folders: mean and standard deviation over the seeds"
    option("--seeds", action="store_true", help=about)
    about = "train policies on reward models and past what those are good for: table and figure"
    more = "Every other option goes to the policies' recipe, as in --learning_rate 2e-4."
    over = add("overoptimize", _overoptimize, about, more)
    for option, name in ((race, "race"), (over, "overoptimization")):
        option("--output_dir", default=f"outputs/{name}", help="(%(default)s)")
        option("--seeds", type=int, default=3, help="runs of each, all on one dataset.seed (3)")
        option("--jobs", type=int, default=1, help="side by side, a thread each (1)")
    about = "models on the same held-out prompts and rewards: one table, with errors"
    more = "Every other option changes the config; write them after the models."
    ask = option = add("evaluate", _evaluate, about, more)
    option("--reference", metavar="MODEL", help="measure the KL to this one")
    option("--answers", metavar="FILE", help="(outputs/answers-N.jsonl)")
    option("--json", action="store_true", help="the same for programs")
    talk = option = add("chat", _chat, "type a prompt, see what one or two models answer", more)
    option("--temperature", type=float, help="of sampled answers (that of training)")
    about = "follow on what was said (not for the embedded model, which knows single turns only)"
    option("--history", action=argparse.BooleanOptionalAction, help=about)
    option("--ui", action="store_true", help="in a browser, on this machine only")
    for option in (ask, talk):
        about = "run, checkpoint, adapter, folder or hub name of a model, or tiny: the embedded one"
        option("models", nargs="+", metavar="MODEL_OR_RUN", help=about)
        option("--config", help="whose prompts and rewards (that of the first run)")
        option("--reward_model", metavar="RUN", help="score the answers with it")
    option = add("merge", _merge, "merge a LoRA adapter into its base, checked")
    option("run_or_adapter", metavar="RUN", help="folder of a run, or of an adapter")
    option("--output", metavar="FOLDER", help="a new one (merged, beside the adapter)")
    about = "a config of the book's published code, or of a command of TRL, for a recipe here"
    option = add("translate", _translate, about)
    option("config", help="YAML file of the book's code, or as `trl dpo --config` takes it")
    option("--command", help="TRL's, such as dpo, where the fields fit several")
    option("--output", help="write to this new file instead of the terminal")
    about = "a table instead: each field there and here, and how much is trained on both sides"
    option("--explain", action="store_true", help=about)
    about = "the book against TRL on the same batches: loss, gradient, why, which setting"
    more = "Without --config and --trainer: every algorithm, a line per comparison for the batch "
    more += "where the two differ most; --batches or --verbose for a line per batch."
    option = add("compare", _compare, about, more)
    option("--algorithms", help="names, separated by commas (all)")
    option("--batches", help="names, separated by commas (all)")
    option("--quick", action="store_true", help="only the batches that tell most")
    option("--format", default="table", choices=("table", "markdown", "json", "html"))
    option("--verbose", action="store_true", help="every batch, and every term")
    about = "a training config: which algorithm does it compute? Twice: how do the two differ?"
    option("--config", action="append", help=about)
    option("--trainer", help="the same of a class, such as mypackage.MyTrainer")
    about = "exit with 1 unless --config or --trainer equals this algorithm (grpo, grpo/code)"
    option("--require", metavar="NAME", help=about)
    about = "check TRL's paper index, config by config (the shipped copy, or a paper_index.md)"
    option("--paper-index", nargs="?", const="", metavar="FILE", help=about)
    option("--page", metavar="FOLDER", help="write README.md and figures there")
    option = add("probe", _probe, "properties that any loss has, of a function or a trainer")
    option("function", nargs="?", metavar="MODULE:FUNCTION", help="its tensors go by their names")
    option("settings", nargs="*", metavar="NAME=VALUE", help="its other arguments")
    about = "the same of a trainer; settings are fields of its config, or an algorithm of ours"
    option("--trainer", metavar="MODULE:CLASS", help=about)
    about = "every recorded completion of a run, or of several side by side, as a page"
    option = add("rollouts", _rollouts, about)
    option("runs", nargs="+", metavar="RUN", help="folder of a run")
    option("--output", help="(RUN/rollouts.html; RUN/rollouts-OTHER.html)")
    if words and not words[0].startswith("-") and words[0] not in commands.choices:
        known = ", ".join(commands.choices)
        hint = nearest(words[0], commands.choices)
        sys.exit(f"error: unknown command {words[0]!r}{hint}; known: {known}")
    args, args.rest = parser.parse_known_args(words)
    if args.rest and args.run not in (_race, _overoptimize, _evaluate, _chat):
        parser.error(f"unknown arguments: {' '.join(args.rest)}")
    try:
        refuse_repeated(words, several=("config",) if args.run is _compare else ())
        args.run(args)
        sys.stdout.flush()
    except InputError as error:
        end(str(error), with_traceback)
    except BrokenPipeError:  # whoever reads has seen enough, as in `rlhf-trl compare | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _algorithms(args: argparse.Namespace) -> None:
    from rlhf_trl.algorithms import ALGORITHMS
    from rlhf_trl.run import explain

    names = list(dict.fromkeys(args.names))
    if args.json:
        print(json.dumps([explain.describe(name) for name in names or ALGORITHMS], indent=2))
    elif len(names) > 1:
        print(explain.side_by_side(names))
    else:
        print(explain.explain(names[0]) if names else explain.table())


def _drift(args: argparse.Namespace) -> None:
    if args.record and Path(args.record).exists() and not args.overwrite:
        raise InputError(f"--record: {args.record!r} exists; add --overwrite or name another file.")
    with _lightly():
        from rlhf_trl.compare import drift, surface
        from rlhf_trl.output import write_whole

        if args.record:
            found = surface.read()
            write_whole(args.record, lambda path: path.write_text(surface.dump(found)))
            print(f"recorded TRL {found['versions']['trl']} in {args.record}")
            return
        moved, recorded, installed = drift.check()
    print(drift.report(moved, recorded, installed, as_json=args.json))
    if moved:
        sys.exit(1)


@contextmanager
def _lightly() -> Iterator[None]:
    """Spare a short command what TRL imports for logs, metadata read twice, and collections."""
    absent = [name for name in ("wandb", "trackio") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))
    once = cache(importlib.metadata.packages_distributions)
    gc.disable()
    try:
        with patch("importlib.metadata.packages_distributions", once):
            yield
    finally:
        gc.enable()
        for name in absent:
            del sys.modules[name]


def _race(args: argparse.Namespace) -> None:
    from rlhf_trl.evaluation import tables
    from rlhf_trl.run.race import legend, race

    names = [name.strip() for name in args.algorithms.split(",")]
    if args.seeds < 1:
        raise InputError(f"--seeds is {args.seeds}; write 1 or more.")
    folder = Path(args.output_dir)
    options = {"config": args.config, "jobs": args.jobs, "extra": args.rest}
    iterations = 1 if args.on_policy else 2
    lines = race(names, args.seeds, folder, **options, iterations=iterations)
    print(tables.text(lines))
    print(f"\n{legend(lines, iterations, args.rest)}")
    print(f"\nrace.md, race.json and race.png are in {folder}")


def _best_of_n(args: argparse.Namespace) -> None:
    from rlhf_trl.evaluation import tables
    from rlhf_trl.evaluation.best_of_n import best_of_n

    print(tables.text(best_of_n(args.runs, args.seeds)))


def _evaluate(args: argparse.Namespace) -> None:
    from rlhf_trl.models import load_quietly
    from rlhf_trl.output import numbered
    from rlhf_trl.run.evaluate import evaluate

    number = max(numbered(Path("outputs"), "answers-"), default=0) + 1
    answers = args.answers or f"outputs/answers-{number}.jsonl"
    options = (args.config, args.rest, args.reward_model, args.reference, args.json)
    load_quietly()
    with redirect_stdout(sys.stderr):  # libraries print, too
        about = evaluate(args.models, answers, *options)
    print(about)


def _chat(args: argparse.Namespace) -> None:
    from rlhf_trl.models import load_quietly
    from rlhf_trl.run import chat, chat_page

    if args.temperature is not None and not 0 < args.temperature < float("inf"):
        raise InputError(f"--temperature is {args.temperature:g}; write a number above 0.")
    options = (args.config, args.rest, args.temperature, args.reward_model, args.history)
    load_quietly()
    if args.ui:
        chat_page.serve(args.models, *options)
    else:
        chat.talk(chat.Chat(args.models, *options))


def _merge(args: argparse.Namespace) -> None:
    from rlhf_trl.models import load_quietly
    from rlhf_trl.run.merge import merge

    load_quietly()
    folder, gap = merge(args.run_or_adapter, args.output)
    print(f"{folder} holds the merged model; its logits differ from the unmerged ones by {gap:.1e}")


def _overoptimize(args: argparse.Namespace) -> None:
    from rlhf_trl.run.folders import home

    campaign = home() / "recipes" / "experiments" / "2026-11-20-over-optimization"
    script = runpy.run_path(str(campaign / "overoptimization.py"))
    folder = Path(args.output_dir)
    print(script["overoptimize"](folder, args.seeds, jobs=args.jobs, extra=args.rest))
    print(f"\noveroptimization.md, overoptimization.json and overoptimization.png are in {folder}")


def _probe(args: argparse.Namespace) -> None:
    from rlhf_trl.compare import probe, probe_trainer
    from rlhf_trl.run.yaml_loader import read_word

    words = [*filter(None, [args.function]), *args.settings]
    what = args.trainer or (words.pop(0) if words else None)
    if what is None:
        raise InputError("probe needs MODULE:FUNCTION, or --trainer MODULE:CLASS")
    pairs = [word.partition("=") for word in words]
    if odd := [name for name, equals, _ in pairs if not equals]:
        raise InputError(f"{odd[0]}: write NAME=VALUE")
    tried = probe_trainer.probe if args.trainer else probe.probe
    found = tried(what, {name: read_word(value) for name, _, value in pairs})
    print(probe.report(found))
    if broken := [each.name for each in found if each.verdict == "broken"]:
        raise InputError(f"{what} is broken: {'; '.join(broken)}")


def _translate(args: argparse.Namespace) -> None:
    from rlhf_trl.ports.book_code import explain, translate, write_translation

    if args.explain:
        if args.output:
            raise InputError("--output is not read with --explain; remove one of the two.")
        print(explain(args.config, args.command))
    elif args.output:
        write_translation(args.config, args.output, args.command)
        print(f"{args.output} is written")
    else:
        print(translate(args.config, command=args.command), end="")


def _rollouts(args: argparse.Namespace) -> None:
    from rlhf_trl.rollouts.page import write_page

    first, *others = args.runs
    names = [os.path.relpath(run, Path(first).parent).replace("../", "") for run in others]
    name = "-".join(["rollouts", *names]).replace(os.sep, "-")
    target = args.output or Path(first, f"{name}.html")
    write_page(args.runs, target)
    print(f"{target} is written; open it in a browser")


def _compare(args: argparse.Namespace) -> None:
    from rlhf_trl.compare import command

    command.run(args)


if __name__ == "__main__":
    main()
