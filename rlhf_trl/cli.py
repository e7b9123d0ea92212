"""The `rlhf-trl` command; each subcommand is a few lines over the package."""

import argparse
import json
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from rlhf_trl.errors import InputError


def main(argv: Sequence[str] | None = None) -> None:
    """Run `rlhf-trl`; an `InputError` ends it with its sentence and exit code 1."""
    parser = argparse.ArgumentParser(prog="rlhf-trl", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="command")
    algorithms = commands.add_parser("algorithms", help="the table of algorithms, or one in full")
    algorithms.add_argument("name", nargs="?", help="explain this algorithm")
    algorithms.add_argument("--json", action="store_true", help="the same for programs")
    algorithms.set_defaults(run=_algorithms)
    drift = commands.add_parser("drift", help="what moved in the installed TRL; exit code 1 if so")
    drift.add_argument("--json", action="store_true", help="the same for programs")
    drift.add_argument("--record", metavar="PATH", help="write the installed surface there instead")
    drift.add_argument("--overwrite", action="store_true", help="let --record replace a file")
    drift.set_defaults(run=_drift)
    race = commands.add_parser(
        "race",
        help="train algorithms side by side: table and figure",
        epilog="Every other option goes to the recipe, as in --max_steps 200.",
        allow_abbrev=False,
    )
    race.add_argument(
        "--algorithms",
        required=True,
        help="names of rows or of our configs in configs/tiny, separated by commas",
    )
    race.add_argument("--config", help="one config for all, instead of configs/tiny/NAME.yaml")
    race.add_argument(
        "--on_policy",
        action="store_true",
        help="one update per generation; by default two (num_iterations 2), since with one no "
        "ratio leaves 1 and most losses coincide",
    )
    race.set_defaults(run=_race)
    best = commands.add_parser(
        "best-of-n",
        help="reward models side by side: how often the candidate that each would choose is right",
        epilog="Reads the scores.jsonl of each run; all must have scored the same candidates.",
    )
    best.add_argument("runs", nargs="+", metavar="RUN", help="folder of a reward model run")
    best.add_argument(
        "--seeds",
        action="store_true",
        help="each RUN holds seed-* folders: mean and standard deviation over the seeds",
    )
    best.set_defaults(run=_best_of_n)
    over = commands.add_parser(
        "overoptimize",
        help="train policies on reward models and past what those are good for: table and figure",
        epilog="Every other option goes to the policies' recipe, as in --learning_rate 2e-4.",
        allow_abbrev=False,
    )
    over.set_defaults(run=_overoptimize)
    for several, name in ((race, "race"), (over, "overoptimization")):
        several.add_argument("--output_dir", default=f"outputs/{name}", help="(%(default)s)")
        several.add_argument("--seeds", type=int, default=3, help="runs of each (3)")
        several.add_argument("--jobs", type=int, default=1, help="side by side, a thread each (1)")
    ask = commands.add_parser(
        "evaluate", help="models on the same held-out prompts and rewards: one table, with errors"
    )
    ask.add_argument("--reference", metavar="MODEL", help="measure the KL to this one")
    ask.add_argument("--answers", metavar="FILE", help="(outputs/answers-N.jsonl)")
    ask.add_argument("--json", action="store_true", help="the same for programs")
    ask.set_defaults(run=_evaluate)
    talk = commands.add_parser("chat", help="type a prompt, see what one or two models answer")
    talk.add_argument("--temperature", type=float, help="of sampled answers (that of training)")
    told = "follow on what was said (not for the embedded model, which knows single turns only)"
    talk.add_argument("--history", action=argparse.BooleanOptionalAction, help=told)
    talk.add_argument("--ui", action="store_true", help="in a browser, on this machine only")
    talk.set_defaults(run=_chat)
    for several in (ask, talk):
        several.allow_abbrev = False
        several.epilog = "Every other option changes the config; write them after the models."
        told = "run, checkpoint, adapter, folder or hub name of a model, or tiny: the embedded one"
        several.add_argument("models", nargs="+", metavar="MODEL_OR_RUN", help=told)
        several.add_argument("--config", help="whose prompts and rewards (that of the first run)")
        several.add_argument("--reward_model", metavar="RUN", help="score the answers with it")
    one = commands.add_parser("merge", help="merge a LoRA adapter into its base, checked")
    one.add_argument("run_or_adapter", metavar="RUN", help="folder of a run, or of an adapter")
    one.add_argument("--output", metavar="FOLDER", help="a new one (merged, beside the adapter)")
    one.set_defaults(run=_merge)
    translate = commands.add_parser(
        "translate", help="a config of the book's published code, for a recipe here"
    )
    translate.add_argument("config", help="YAML file of the book's code")
    translate.add_argument("--output", help="write to this new file instead of the terminal")
    translate.set_defaults(run=_translate)
    compare = commands.add_parser(
        "compare",
        help="the book against TRL on the same batches: loss, gradient, why, which setting",
        epilog="Without --config and --trainer: every algorithm, a line per comparison for the "
        "batch where the two differ most; --batches or --verbose for a line per batch.",
    )
    compare.add_argument("--algorithms", help="names, separated by commas (all)")
    compare.add_argument("--batches", help="names, separated by commas (all)")
    compare.add_argument("--format", default="table", choices=("table", "markdown", "json", "html"))
    compare.add_argument("--verbose", action="store_true", help="every batch, and every term")
    compare.add_argument("--config", help="a training config: which algorithm does it compute?")
    compare.add_argument("--trainer", help="the same of a class, such as mypackage.MyTrainer")
    compare.add_argument(
        "--require",
        metavar="NAME",
        help="exit with 1 unless --config or --trainer equals this algorithm (grpo, grpo/code)",
    )
    compare.add_argument(
        "--paper-index",
        nargs="?",
        const="",
        metavar="FILE",
        help="check the config that TRL's paper index has for each paper (the shipped copy's, or "
        "another paper_index.md's)",
    )
    compare.add_argument("--page", metavar="FOLDER", help="write README.md and figures there")
    compare.set_defaults(run=_compare)
    probe = commands.add_parser(
        "probe", help="properties that any policy-gradient loss has, tried on a function"
    )
    probe.add_argument("function", metavar="MODULE:FUNCTION", help="its tensors go by their names")
    probe.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="its other arguments")
    probe.set_defaults(run=_probe)
    rollouts = commands.add_parser(
        "rollouts", help="every recorded completion of a run, or of several side by side, as a page"
    )
    rollouts.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    rollouts.add_argument("--output", help="write to this file instead of RUN/rollouts.html")
    rollouts.set_defaults(run=_rollouts)
    args, args.rest = parser.parse_known_args(argv)
    if args.rest and args.run not in (_race, _overoptimize, _evaluate, _chat):
        parser.error(f"unknown arguments: {' '.join(args.rest)}")
    try:
        args.run(args)
        sys.stdout.flush()
    except InputError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # whoever reads has seen enough, as in `rlhf-trl compare | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _algorithms(args: argparse.Namespace) -> None:
    from rlhf_trl.algorithms import ALGORITHMS
    from rlhf_trl.compare import explain

    if args.json:
        names = [args.name] if args.name else list(ALGORITHMS)
        print(json.dumps([explain.describe(name) for name in names], indent=2))
    else:
        print(explain.explain(args.name) if args.name else explain.table())


def _drift(args: argparse.Namespace) -> None:
    if args.record and Path(args.record).exists() and not args.overwrite:
        raise InputError(f"--record: {args.record!r} exists; add --overwrite or name another file.")
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


def _race(args: argparse.Namespace) -> None:
    from rlhf_trl.evaluation import tables
    from rlhf_trl.run.race import race

    names = [name.strip() for name in args.algorithms.split(",")]
    if args.seeds < 1:
        raise InputError(f"--seeds is {args.seeds}; write 1 or more.")
    folder = Path(args.output_dir)
    options = {"config": args.config, "jobs": args.jobs, "extra": args.rest}
    lines = race(names, args.seeds, folder, **options, iterations=1 if args.on_policy else 2)
    print(tables.text(lines))
    print(f"\nrace.md, race.json and race.png are in {folder}")


def _best_of_n(args: argparse.Namespace) -> None:
    from rlhf_trl.evaluation import tables
    from rlhf_trl.evaluation.best_of_n import best_of_n

    print(tables.text(best_of_n(args.runs, args.seeds)))


def _quiet() -> None:
    """Keep bars of loading, and DeepSpeed's notice that there is no GPU, off the screen."""
    import transformers

    transformers.logging.disable_progress_bar()
    notice = "Setting accelerator to CPU"
    logging.getLogger("DeepSpeed").addFilter(lambda record: notice not in record.getMessage())


def _evaluate(args: argparse.Namespace) -> None:
    from rlhf_trl.output import numbered
    from rlhf_trl.run.evaluate import evaluate

    number = max(numbered(Path("outputs"), "answers-"), default=0) + 1
    answers = args.answers or f"outputs/answers-{number}.jsonl"
    options = (args.config, args.rest, args.reward_model, args.reference, args.json)
    _quiet()
    with redirect_stdout(sys.stderr):  # libraries print, too
        told = evaluate(args.models, answers, *options)
    print(told)


def _chat(args: argparse.Namespace) -> None:
    from rlhf_trl.run import chat, chat_page

    if args.temperature is not None and not 0 < args.temperature < float("inf"):
        raise InputError(f"--temperature is {args.temperature:g}; write a number above 0.")
    options = (args.config, args.rest, args.temperature, args.reward_model, args.history)
    _quiet()
    if args.ui:
        chat_page.serve(args.models, *options)
    else:
        chat.talk(chat.Chat(args.models, *options))


def _merge(args: argparse.Namespace) -> None:
    from rlhf_trl.run.merge import merge

    _quiet()
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
    from rlhf_trl.compare.probe import probe, report
    from rlhf_trl.run.yaml_loader import read_word

    pairs = [word.partition("=") for word in args.settings]
    if odd := [name for name, equals, _ in pairs if not equals]:
        raise InputError(f"{odd[0]}: write NAME=VALUE")
    found = probe(args.function, {name: read_word(value) for name, _, value in pairs})
    print(report(found))
    if broken := [each.name for each in found if each.verdict == "broken"]:
        raise InputError(f"{args.function} is broken: {'; '.join(broken)}")


def _translate(args: argparse.Namespace) -> None:
    from rlhf_trl.compare.translate import translate, write_translation

    if args.output:
        write_translation(args.config, args.output)
        print(f"{args.output} is written")
    else:
        print(translate(args.config), end="")


def _rollouts(args: argparse.Namespace) -> None:
    from rlhf_trl.rollouts.page import write_page

    target = args.output or Path(args.runs[0], "rollouts.html")
    write_page(args.runs, target)
    print(f"{target} is written; open it in a browser")


def _compare(args: argparse.Namespace) -> None:
    from rlhf_trl.compare import command

    command.run(args)


if __name__ == "__main__":
    main()
