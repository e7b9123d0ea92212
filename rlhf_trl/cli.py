"""The `rlhf-trl` command; each subcommand is a few lines over the package."""

import argparse
import gc
import importlib.metadata
import json
import os
import re
import signal
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
    parser.add_argument(
        "--traceback",
        action="store_true",
        help="with any command: show where an error comes from",
    )
    version = importlib.metadata.version
    parser.add_argument(
        "--version",
        action="version",
        version=f"rlhf_trl {version('rlhf_trl')}, TRL {version('trl')}",
    )
    commands = _Commands(parser)
    for add_command in (
        _add_train,
        _add_configs,
        _add_doctor,
        _add_algorithms,
        _add_drift,
        _add_race,
        _add_best_of_n,
        _add_preview,
        _add_plan,
        _add_pipeline,
        _add_evaluate,
        _add_judge,
        _add_chat,
        _add_merge,
        _add_quantize,
        _add_translate,
        _add_compare,
        _add_probe,
        _add_check_launch,
        _add_rollouts,
        _add_runs,
    ):
        add_command(commands)
    if words and not words[0].startswith("-") and words[0] not in commands.names:
        known = ", ".join(commands.names)
        hint = nearest(words[0], commands.names)
        sys.exit(f"error: unknown command {words[0]!r}{hint}; known: {known}")
    try:
        args, args.recipe_options = parser.parse_known_args(words)
        args.traceback = with_traceback
        if args.recipe_options and not args.takes_recipe_options:
            parser.error(f"unknown arguments: {' '.join(args.recipe_options)}")
        # only `compare` takes two configs, to compare them
        refuse_repeated(words, several=("config",) if args.run is _compare else ())
        args.run(args)
        sys.stdout.flush()
    except InputError as error:
        end(str(error), with_traceback)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # whoever reads has seen enough, as in `rlhf-trl compare | head`
        # Python flushes stdout once more when it exits, which would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        from rlhf_trl.run.failures import UNWRITABLE

        message = " ".join(str(error).split())
        if not re.search(f"{UNWRITABLE}|Permission denied|Not a directory", message):
            raise
        end(
            f"a file could not be written ({message}); make room, or name another place.",
            with_traceback,
        )


Command = Callable[[argparse.Namespace], None]
Option = Callable[..., Any]  # argparse's `add_argument`


class _Commands:
    """The subcommands of a parser."""

    def __init__(self, parser: argparse.ArgumentParser):
        self._commands = parser.add_subparsers(required=True, metavar="command")

    @property
    def names(self) -> list[str]:
        """Return the names of all commands, in order."""
        return [*self._commands.choices]

    def add(
        self,
        name: str,
        run: Command,
        help: str,
        recipe_options: str = "",
        epilog: str = "",
        add_help: bool = True,
    ) -> Option:
        """Add a command, and return what adds an option to it.

        Args:
            name: the name of the command.
            run: the function that does what the command is for.
            help: a line about the command.
            recipe_options: a sentence about all further options, for a command that hands these to
                a recipe; "" for a command that refuses them.
            epilog: another sentence at the end of the command's help.
            add_help: whether it has the usual `--help`.
        """
        command = self._commands.add_parser(
            name,
            help=help,
            epilog=recipe_options or epilog,
            allow_abbrev=False,
            add_help=add_help,
        )
        command.set_defaults(run=run, takes_recipe_options=bool(recipe_options))
        return command.add_argument


class _TrainHelp(argparse.Action):
    """Prints the help of `rlhf-trl train`, and that of the recipe if one is named."""

    def __call__(self, parser, namespace, values, option_string=None):
        """End the program with the help; `values` is the word that follows the option."""
        from rlhf_trl.run.stages import STAGES

        parser.print_help()
        stage = STAGES.get(namespace.stage or values)
        if stage:
            print(stage.help(everything=values == "all"), flush=True)
        parser.exit()


def _add_train(commands: _Commands) -> None:
    """Add `rlhf-trl train` with its options."""
    option = commands.add(
        "train",
        _train,
        "launch a recipe, from any folder, and print the command that does it",
        "Every other option goes to the recipe, as in --max_steps 200; `rlhf-trl configs show "
        "CONFIG` lists them with their values.",
        add_help=False,
    )
    option("stage", metavar="RECIPE", help="such as grpo, dpo, sft, reward")
    option(
        "-h",
        "--help",
        action=_TrainHelp,
        nargs="?",
        metavar="all",
        help="behind a RECIPE: its fields, too, and behind --help all, all of TRL's",
    )
    option("--config", help="a file, or one that ships, such as tiny/grpo")
    option("--accelerate", metavar="FILE", help="or a name, such as zero2 (that of the machine)")
    option("--processes", type=int, help="how many (one for each GPU; on a CPU one)")


def _add_configs(commands: _Commands) -> None:
    """Add `rlhf-trl configs` with its options."""
    option = commands.add(
        "configs",
        _configs,
        "the configs that ship; copy one, show its values, see what differs between two",
        "Every other option of `show` changes the config.",
    )
    option(
        "words",
        nargs="*",
        metavar="WORD",
        help="part of a name; or copy CONFIG NEW_FILE, diff CONFIG CONFIG, show CONFIG, where a "
        "config is a file or a name, such as own/dpo",
    )


def _add_doctor(commands: _Commands) -> None:
    commands.add(
        "doctor",
        _doctor,
        "what is installed and what this machine has: ok, or what to do; exit code 1 if nothing "
        "can train so",
    )


def _add_algorithms(commands: _Commands) -> None:
    option = commands.add("algorithms", _algorithms, "the table of algorithms, or those named")
    option("names", nargs="*", metavar="NAME", help="explain it, or several side by side")
    option("--json", action="store_true", help="the same for programs")


def _add_drift(commands: _Commands) -> None:
    option = commands.add("drift", _drift, "what moved in the installed TRL; exit code 1 if so")
    option("--json", action="store_true", help="the same for programs")
    option(
        "--strict",
        action="store_true",
        help="exit code 1 also where code differs from what was recorded and no measurement does",
    )
    option("--processes", type=int, choices=[1, 2], default=1, help="2: also runs on two (1)")
    option("--record", metavar="PATH", help="write the installed surface there instead")
    option(
        "--record_sources",
        metavar="PATH",
        help="write there what our runs execute of the installed libraries (takes minutes)",
    )
    option("--overwrite", action="store_true", help="let either of the two replace a file")


def _add_race(commands: _Commands) -> None:
    """Add `rlhf-trl race` with its options."""
    option = commands.add(
        "race",
        _race,
        "train algorithms side by side: table and figure",
        "Every other option goes to the recipe, as in --max_steps 200.",
    )
    option(
        "--algorithms",
        required=True,
        help="names of rows or of our configs in configs/tiny, separated by commas",
    )
    option("--config", help="one config for all, instead of configs/tiny/NAME.yaml")
    option(
        "--on_policy",
        action="store_true",
        help="one update per generation; by default two (num_iterations 2), since with one no "
        "ratio leaves 1 and most losses coincide",
    )
    option("--output_dir", default="outputs/race", help="(%(default)s)")
    option("--seeds", type=int, default=3, help="runs of each, all on one dataset.seed (3)")
    option("--jobs", type=int, default=1, help="side by side, a thread each (1)")


def _add_best_of_n(commands: _Commands) -> None:
    option = commands.add(
        "best-of-n",
        _best_of_n,
        "reward models side by side: how often the candidate that each would choose is right",
        epilog="Reads the scores.jsonl of each run; all must have scored the same candidates.",
    )
    option("runs", nargs="+", metavar="RUN", help="folder of a reward model run")
    option(
        "--seeds",
        action="store_true",
        help="each RUN holds seed-* folders: mean and standard deviation over the seeds",
    )


def _add_preview(commands: _Commands) -> None:
    option = commands.add(
        "preview",
        _preview,
        "what a config would train on: rows, lengths, faults, examples with marks, rewards, steps",
        "Every other option changes the config.",
    )
    option("config", help="of any recipe")
    option("--json", action="store_true", help="the same for programs")
    option("--html", metavar="FILE", help="write it as a page, too, with whole examples")
    option("--completion", metavar="TEXT", help="that rewards judge (the right answer of each row)")
    option(
        "--sample",
        action="store_true",
        help="load the model, and let it answer the prompts that are shown; rewards judge that",
    )


def _add_plan(commands: _Commands) -> None:
    option = commands.add(
        "plan",
        _plan,
        "the memory and batches of a run, estimated before any weight is loaded",
        "Every other option changes the config.",
    )
    option("--config", help="of any recipe that trains")
    option("--table", action="store_true", help="instead of a config: models by methods")
    option("--accelerate", metavar="FILE", help="what accelerate launch --config_file will get")
    option("--gpus", type=int, help="processes over all nodes (those of the file, else 1)")
    option("--nodes", type=int, help="machines (those of the file, else 1)")
    option("--gpu-memory", metavar="80GB", help="say whether it fits, and else what would")
    option("--prompt-tokens", type=int, default=256, help="of the longest prompt (256)")
    option("--text-tokens", type=int, default=1024, help="where max_length is not set (1024)")


def _add_pipeline(commands: _Commands) -> None:
    """Add `rlhf-trl pipeline` with its options."""
    option = commands.add(
        "pipeline",
        _pipeline,
        "from preferences to a frontier: train a list of stages, let them answer, write a page",
        "Every other option goes to all stages, as in --model_name_or_path or --dataset.path.",
    )
    option("config", help="YAML file of the stages, such as configs/pipeline/tiny.yaml")
    option("--output_dir", help="(that of the YAML)")
    option("--seeds", type=int, default=1, help="runs of each stage (1)")
    option("--jobs", type=int, default=1, help="runs side by side (1)")
    option(
        "--accelerate",
        metavar="FILE",
        help="launch with this config (configs/accelerate/cpu.yaml, each run on one thread)",
    )


CHANGES_THE_CONFIG = "Every other option changes the config; write them after the models."


def _add_evaluate(commands: _Commands) -> None:
    """Add `rlhf-trl evaluate` with its options."""
    option = commands.add(
        "evaluate",
        _evaluate,
        "models on the same held-out prompts and rewards: one table, with errors",
        CHANGES_THE_CONFIG,
    )
    option("--reference", metavar="MODEL", help="measure the KL to this one")
    option("--answers", metavar="FILE", help="(outputs/answers-N.jsonl)")
    option("--samples", type=int, default=1, metavar="N", help="answers sampled per prompt (1)")
    option("--markdown", metavar="FILE", help="write the table and some answers there, too")
    option(
        "--probes",
        metavar="FILE",
        help="ask prompts of a JSONL file with checks instead, or general or longer_words: ours",
    )
    option("--json", action="store_true", help="the same for programs")
    _add_model_options(option)


def _add_judge(commands: _Commands) -> None:
    """Add `rlhf-trl judge` with its options."""
    option = commands.add(
        "judge",
        _judge,
        "win rate of each model of a file of answers over the first one, by an LLM",
        epilog="An interrupted command goes on where it stopped: replies are kept in judge.sqlite.",
    )
    option("answers", metavar="ANSWERS", help="what `rlhf-trl evaluate --answers` has written")
    option("--base_url", metavar="URL", help="of an OpenAI API, as in http://127.0.0.1:8000/v1")
    option("--model", metavar="NAME", help="the judge, as the server calls it")
    option(
        "--by",
        metavar="SCORE_OR_RUN",
        help="in place of a judge: a score of the file, such as exact_match, or the reward model "
        "that `evaluate` was given",
    )
    option("--models", nargs="+", default=[], help="these only, the first one first (all)")
    option("--samples", type=int, default=1, help="answers to each prompt; 0: the greedy one (1)")
    option("--rubric", metavar="FILE", help="text with {prompt}, {answer_a} and {answer_b}")
    option("--max_requests", type=int, default=1000, metavar="N", help="send no more (1000)")
    option("--parallel", type=int, default=8, metavar="N", help="requests at a time (8)")
    option(
        "--api_key_env",
        metavar="NAME",
        default="OPENAI_API_KEY",
        help="environment variable that holds the key (%(default)s)",
    )
    option("--request", metavar="JSON", help="its other fields: temperature 0, max_tokens 1024")
    option("--output", metavar="PATH", help="of .jsonl and .md files (outputs/verdicts-N)")


def _add_chat(commands: _Commands) -> None:
    option = commands.add(
        "chat", _chat, "type a prompt, see what one or two models answer", CHANGES_THE_CONFIG
    )
    option("--temperature", type=float, help="of sampled answers (that of training)")
    option(
        "--history",
        action=argparse.BooleanOptionalAction,
        help="follow on what was said (not for the embedded model, which knows single turns only)",
    )
    option("--ui", action="store_true", help="in a browser, on this machine only")
    option("--port", type=int, help="of --ui (a free one)")
    _add_model_options(option)


def _add_model_options(option: Option) -> None:
    """Add the options of commands in which models answer."""
    option(
        "models",
        nargs="+",
        metavar="MODEL_OR_RUN",
        help="run, checkpoint, adapter, folder or hub name of a model, or tiny: the embedded one",
    )
    option("--config", help="whose prompts and rewards (that of the first run)")
    option("--reward_model", metavar="RUN", help="score the answers with it")


def _add_merge(commands: _Commands) -> None:
    option = commands.add("merge", _merge, "merge a LoRA adapter into its base, checked")
    option("run_or_adapter", metavar="RUN", help="folder of a run, or of an adapter")
    option("--output", metavar="FOLDER", help="a new one (merged, beside the adapter)")


def _add_quantize(commands: _Commands) -> None:
    option = commands.add(
        "quantize",
        _quantize,
        "write a model in 8 or 4 bits, and measure what that changes",
        CHANGES_THE_CONFIG.replace("models", "model"),
    )
    option("model", metavar="MODEL_OR_RUN", help="run, checkpoint, adapter, folder or hub name")
    option("--to", required=True, help="int8 (torchao), int8_bitsandbytes or nf4 (bitsandbytes)")
    option("--output", metavar="FOLDER", help="a new one (beside the model: model-int8)")
    option("--config", help="on whose held-out prompts or answers it is measured (its run's)")


def _add_translate(commands: _Commands) -> None:
    from rlhf_trl.ports.commands import COMMANDS

    option = commands.add(
        "translate",
        _translate,
        "a config of the book's published code, or of a command of TRL, for a recipe here",
    )
    option("config", help="YAML file of the book's code, or as `trl dpo --config` takes it")
    option("--command", help=f"TRL's ({', '.join(COMMANDS)}), where the fields fit several")
    option("--output", help="write to this new file instead of the terminal")
    option(
        "--explain",
        action="store_true",
        help="a table instead: each field there and here, and how much is trained on both sides",
    )


def _add_compare(commands: _Commands) -> None:
    """Add `rlhf-trl compare` with its options."""
    option = commands.add(
        "compare",
        _compare,
        "the book against TRL on the same batches: loss, gradient, why, which setting",
        epilog="Without --config and --trainer: every algorithm, a line per comparison for the "
        "batch where the two differ most; --batches or --verbose for a line per batch.",
    )
    option("--algorithms", help="names, separated by commas (all)")
    option("--batches", help="names, separated by commas (all)")
    option("--quick", action="store_true", help="only the batches that tell most")
    option("--format", default="table", choices=("table", "markdown", "json", "html"))
    option("--verbose", action="store_true", help="every batch, and every term")
    option(
        "--config",
        action="append",
        help="a training config: which algorithm does it compute? Twice: how do the two differ?",
    )
    option("--trainer", help="the same of a class, such as mypackage.MyTrainer")
    option(
        "--require",
        metavar="NAME",
        help="exit with 1 unless --config or --trainer equals this algorithm (grpo, grpo/code)",
    )
    option(
        "--paper-index",
        nargs="?",
        const="",
        metavar="FILE",
        help="check TRL's paper index, config by config (the shipped copy, or a paper_index.md)",
    )
    option("--page", metavar="FOLDER", help="write README.md and figures there")


def _add_probe(commands: _Commands) -> None:
    option = commands.add(
        "probe", _probe, "properties that any loss has, of a function or a trainer"
    )
    option("function", nargs="?", metavar="MODULE:FUNCTION", help="its tensors go by their names")
    option("settings", nargs="*", metavar="NAME=VALUE", help="its other arguments")
    option(
        "--trainer",
        metavar="MODULE:CLASS",
        help="the same of a trainer; settings are fields of its config, or an algorithm of ours",
    )


def _add_check_launch(commands: _Commands) -> None:
    option = commands.add(
        "check-launch",
        _check_launch,
        "whether several processes make the update of one: same, scaled or different, and why",
        "Start it with `accelerate launch ... -m rlhf_trl.cli check-launch`. Every other option "
        "changes the config.",
    )
    option("--config", required=True, help="of the run that is to be launched so")
    option("--limit", type=float, default=120, help="seconds after which a training hangs (120)")


def _add_rollouts(commands: _Commands) -> None:
    option = commands.add(
        "rollouts",
        _rollouts,
        "every recorded completion of a run, or of several side by side, as a page",
    )
    option("runs", nargs="+", metavar="RUN", help="folder of a run")
    option("--output", help="(RUN/rollouts.html; RUN/rollouts-OTHER.html)")


def _add_runs(commands: _Commands) -> None:
    """Add `rlhf-trl runs` with its options."""
    option = commands.add(
        "runs",
        _runs,
        "the runs in a folder: a line for each, what was made from what, which may go",
        epilog="A deletion that was ended leaves what it had renamed to .deleted-NAME: "
        "--delete --yes, without a path, removes that.",
    )
    option("folder", nargs="?", default="outputs", metavar="FOLDER", help="(%(default)s)")
    option("--tree", action="store_true", help="draw which run was made from which")
    option("--compare", nargs=2, metavar="RUN", help="settings that differ, and both curves")
    option("--json", action="store_true", help="the same for programs")
    option(
        "--delete",
        nargs="*",
        metavar="PATH",
        help="RUN, RUN/checkpoint-N, RUN/rollouts.sqlite or a copy of a model in RUN; write it "
        "behind FOLDER",
    )
    option("--yes", action="store_true", help="do it; without, --delete says what it would do")


def _train(args: argparse.Namespace) -> None:
    """Launch a recipe, and end with its exit code."""
    from rlhf_trl.run.launching import train

    words = [*args.recipe_options, *["--traceback"] * args.traceback]
    code = train(args.stage, args.config, words, args.accelerate, args.processes)
    if code:
        sys.exit(code)


def _configs(args: argparse.Namespace) -> None:
    """List the configs that ship; or copy one, show one, or print what differs between two."""
    verb, *names = args.words or [""]
    wanted = {"copy": 2, "diff": 2, "show": 1}.get(verb, 0)
    if len(names) != wanted:
        raise InputError(
            "configs: write part of a name, copy CONFIG NEW_FILE, diff CONFIG CONFIG or show "
            "CONFIG."
        )
    if args.recipe_options and verb != "show":
        raise InputError(f"configs: {args.recipe_options[0]} is read by `configs show` alone.")
    if verb == "copy":
        from rlhf_trl.run.config_copies import copy

        copy(*names)
        print(f"{names[1]} is written")
    elif verb in ("diff", "show"):
        from rlhf_trl.models import load_quietly
        from rlhf_trl.run import resolved

        load_quietly()
        is_diff = verb == "diff"
        text = (
            resolved.differences_shown(*names)
            if is_diff
            else resolved.shown(*names, args.recipe_options)
        )
        print(text)
    else:
        from rlhf_trl.evaluation import tables
        from rlhf_trl.run.config_copies import listing

        parts = [tables.text(lines, width=sys.maxsize) for lines in listing(verb) if lines]
        print("\n\n".join(parts))


def _doctor(args: argparse.Namespace) -> None:
    """Print each finding as it comes."""
    from rlhf_trl.run.doctor import findings

    stopping = []
    for finding in findings():
        print(finding, flush=True)
        if finding.stops:
            stopping.append(finding.subject)
    if stopping:
        sys.exit(f"error: nothing trains here before this is mended: {', '.join(stopping)}.")


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
    """Record the installed TRL's surface or sources, or report what moved in them since."""
    for name in ("record", "record_sources"):
        path = getattr(args, name)
        if path and Path(path).exists() and not args.overwrite:
            raise InputError(f"--{name}: {path!r} exists; add --overwrite or name another file.")
    with _fast_imports():
        from rlhf_trl.compare.drift import differences, sources, surface
        from rlhf_trl.output import write_whole

        if args.record_sources:
            from rlhf_trl.compare.drift.tracing import executed

            executed_sources = sources.dump(sources.record(executed()))
            write_whole(args.record_sources, lambda path: path.write_text(executed_sources))
        if args.record:
            installed_surface = surface.read()
            write_whole(args.record, lambda path: path.write_text(surface.dump(installed_surface)))
        if args.record or args.record_sources:
            files = " and ".join(filter(None, (args.record, args.record_sources)))
            print(f"recorded TRL {importlib.metadata.version('trl')} in {files}")
            return
        changes = sources.changes()  # first: measuring loads modules, and patches some of them
        moved, recorded, installed = differences.check(processes=args.processes)
    print(differences.report(moved, changes, recorded, installed, as_json=args.json))
    if moved or (changes and args.strict):
        sys.exit(1)


@contextmanager
def _fast_imports() -> Iterator[None]:
    """Make the import of TRL short: no trackers, metadata read once, no garbage collection."""
    not_imported_yet = [name for name in ("wandb", "trackio") if name not in sys.modules]
    # Python refuses to import a module that is None in this dictionary
    sys.modules.update(dict.fromkeys(not_imported_yet))
    read_once = cache(importlib.metadata.packages_distributions)
    gc.disable()
    try:
        with patch("importlib.metadata.packages_distributions", read_once):
            yield
    finally:
        gc.enable()
        for name in not_imported_yet:
            del sys.modules[name]


def _race(args: argparse.Namespace) -> None:
    """Race the algorithms, and print the table with its legend."""
    from rlhf_trl.evaluation import tables
    from rlhf_trl.run.race import legend, race

    names = [name.strip() for name in args.algorithms.split(",")]
    if args.seeds < 1:
        raise InputError(f"--seeds is {args.seeds}; write 1 or more.")
    folder = Path(args.output_dir)
    options = {"config": args.config, "jobs": args.jobs, "extra": args.recipe_options}
    iterations = 1 if args.on_policy else 2
    lines = race(names, args.seeds, folder, **options, iterations=iterations)
    print(tables.text(lines))
    print(f"\n{legend(lines, iterations, args.recipe_options)}")
    print(f"\nrace.md, race.json and race.png are in {folder}")


def _best_of_n(args: argparse.Namespace) -> None:
    from rlhf_trl.evaluation import tables
    from rlhf_trl.evaluation.best_of_n import best_of_n

    print(tables.text(best_of_n(args.runs, args.seeds)))


def _evaluate(args: argparse.Namespace) -> None:
    """Print the table (or JSON) of `evaluate`, and nothing else, on stdout."""
    from rlhf_trl.models import load_quietly
    from rlhf_trl.output import numbered
    from rlhf_trl.run.evaluate import evaluate

    number = max(numbered(Path("outputs"), "answers-"), default=0) + 1
    answers = args.answers or f"outputs/answers-{number}.jsonl"
    load_quietly()
    with redirect_stdout(sys.stderr):  # libraries print, too, but stdout is for the result alone
        text = evaluate(
            args.models,
            answers,
            config=args.config,
            words=args.recipe_options,
            reward_model=args.reward_model,
            reference=args.reference,
            as_json=args.json,
            samples=args.samples,
            markdown=args.markdown,
            probes=args.probes,
        )
    print(text)


def _judge(args: argparse.Namespace) -> None:
    """Print the table of win rates; too many lost pairs are an error."""
    from rlhf_trl.evaluation.pairwise import win_rates
    from rlhf_trl.output import numbered
    from rlhf_trl.rewards.judge import LLMJudge
    from rlhf_trl.run.yaml_loader import read_word

    judge = None  # with --by a score or a reward model decides in its place
    if args.by is None:
        if not (args.base_url and args.model):
            raise InputError("judge needs --base_url and --model, or --by.")
        names = ("base_url", "model", "rubric", "parallel", "api_key_env")
        fields = {name: getattr(args, name) for name in names} | {"cap": args.max_requests}
        if args.request is not None:
            fields["request"] = read_word(args.request)
        judge = LLMJudge(**fields)
    number = max(numbered(Path("outputs"), "verdicts-"), default=0) + 1
    output = args.output or f"outputs/verdicts-{number}"
    with redirect_stdout(sys.stderr):  # stdout is for the table alone
        text, fault = win_rates(args.answers, output, judge, args.by, args.models, args.samples)
    print(text)
    if fault:
        raise InputError(fault)


def _chat(args: argparse.Namespace) -> None:
    """Talk to models in the terminal, or serve the page."""
    from rlhf_trl.models import load_quietly
    from rlhf_trl.run import chat, chat_page

    if args.temperature is not None and not 0 < args.temperature < float("inf"):
        raise InputError(f"--temperature is {args.temperature:g}; write a number above 0.")
    options = {
        "config": args.config,
        "words": args.recipe_options,
        "temperature": args.temperature,
        "reward_model": args.reward_model,
        "history": args.history,
    }
    if args.port is not None and not args.ui:
        raise InputError("--port is read with --ui only; add --ui, or remove it.")
    load_quietly()
    if args.ui:
        chat_page.serve(args.models, port=args.port, **options)
    else:
        chat.talk(chat.Chat(args.models, **options))


def _merge(args: argparse.Namespace) -> None:
    from rlhf_trl.models import load_quietly
    from rlhf_trl.run.merge import merge

    load_quietly()
    folder, gap = merge(args.run_or_adapter, args.output)
    print(f"{folder} holds the merged model; its logits differ from the unmerged ones by {gap:.1e}")


def _quantize(args: argparse.Namespace) -> None:
    from rlhf_trl.models import load_quietly

    load_quietly()  # before the libraries, which print while they are imported
    from rlhf_trl.run.quantize import quantize

    with redirect_stdout(sys.stderr):
        options = {"output": args.output, "config": args.config, "words": args.recipe_options}
        folder, table = quantize(args.model, args.to, **options)
    print(f"{table}\n\n{folder} holds the quantized model; reloaded, it is what was measured")


def _preview(args: argparse.Namespace) -> None:
    """Print the report on a config, and nothing else, on stdout."""
    from datasets import disable_progress_bars

    from rlhf_trl.models import load_quietly
    from rlhf_trl.run.preview_report import report, terminal

    load_quietly()
    disable_progress_bars()
    width, in_color = terminal()
    with redirect_stdout(sys.stderr):  # libraries print, too, but stdout is for the result alone
        shown = report(args.config, args.recipe_options, args.completion, args.sample)
    if args.html:
        shown.write_html(args.html)
    print(shown.as_json() if args.json else shown.as_text(width, in_color))
    if args.html and not args.json:
        print(f"\n{args.html} is written; open it in a browser")


def _plan(args: argparse.Namespace) -> None:
    """Print what `plan` computes, and nothing else, on stdout."""
    from rlhf_trl.models import load_quietly
    from rlhf_trl.run.plan import planned_page, planned_table

    if bool(args.config) == args.table:
        raise InputError("plan: write either --config FILE or --table.")
    options = (args.accelerate, args.gpus, args.nodes, args.gpu_memory, *args.recipe_options)
    if args.table and any(option is not None for option in options):
        raise InputError("plan --table reads --text-tokens alone; remove the other options.")
    load_quietly()
    if args.table:
        with redirect_stdout(sys.stderr):
            table = planned_table(args.text_tokens)
        print(table)
        return
    with redirect_stdout(sys.stderr):
        page = planned_page(
            args.config,
            args.recipe_options,
            accelerate=args.accelerate,
            gpus=args.gpus,
            nodes=args.nodes,
            gpu_memory=args.gpu_memory,
            prompt_tokens=args.prompt_tokens,
            text_tokens=args.text_tokens,
        )
    print(page)


def _pipeline(args: argparse.Namespace) -> None:
    """Do what is left of a pipeline."""
    from rlhf_trl.models import load_quietly
    from rlhf_trl.pipeline.command import pipeline

    load_quietly()
    page = pipeline(
        args.config,
        args.seeds,
        jobs=args.jobs,
        accelerate=args.accelerate,
        output_dir=args.output_dir,
        words=args.recipe_options,
    )
    print(f"{page} is written; open it in a browser")


def _probe(args: argparse.Namespace) -> None:
    """Report the properties of a loss function or trainer; a broken property is an error."""
    from rlhf_trl.compare.probe import loss as probe
    from rlhf_trl.compare.probe import trainer as probe_trainer
    from rlhf_trl.run.yaml_loader import read_word

    # With --trainer all words are settings, but argparse has taken the first one for the function.
    words = [*filter(None, [args.function]), *args.settings]
    subject = args.trainer
    if subject is None:
        if not words:
            raise InputError("probe needs MODULE:FUNCTION, or --trainer MODULE:CLASS")
        subject = words.pop(0)
    settings = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise InputError(f"{name}: write NAME=VALUE")
        settings[name] = read_word(value)
    run_probe = probe_trainer.probe if args.trainer else probe.probe
    properties = run_probe(subject, settings)
    print(probe.report(properties))
    broken = [item.name for item in properties if item.verdict == "broken"]
    if broken:
        raise InputError(f"{subject} is broken: {'; '.join(broken)}")


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
    """Write the page of runs, by default into the first one's folder and named after the others."""
    from rlhf_trl.rollouts.page import write_page

    first, *others = args.runs
    names = [os.path.relpath(run, Path(first).parent).replace("../", "") for run in others]
    name = "-".join(["rollouts", *names]).replace(os.sep, "-")
    target = args.output or Path(first, f"{name}.html")
    write_page(args.runs, target)
    print(f"{target} is written; open it in a browser")


def _runs(args: argparse.Namespace) -> None:
    """Compare two runs, delete, draw the tree of runs, or list them: print what that returns."""
    if args.yes and args.delete is None:
        raise InputError("--yes is read with --delete only; remove it, or name what to delete.")
    if args.tree + bool(args.compare) + (args.delete is not None) > 1:
        raise InputError("write one of --tree, --compare and --delete.")
    from rlhf_trl.pipeline import deletion, lineage, runs

    folder = Path(args.folder)
    if args.compare:
        content, as_text = runs.compare(*map(Path, args.compare)), runs.comparison
    elif args.delete is not None:
        content, as_text = deletion.delete(folder, args.delete, args.yes), deletion.report
    elif args.tree:
        content, as_text = lineage.lineage(lineage.runs_in(folder)), lineage.tree
    else:
        content, as_text = runs.listing(folder), runs.table
    print(json.dumps(content, indent=2, default=str) if args.json else as_text(content))


def _check_launch(args: argparse.Namespace) -> None:
    """Check the launch that this process is a part of; an error is told once for all ranks."""
    from rlhf_trl.compare.launch.watch import end_on_signals
    from rlhf_trl.models import load_quietly
    from rlhf_trl.run.launch import recipe, world_size

    def check() -> None:
        end_on_signals()
        if world_size() == 1:
            raise InputError("nothing to compare; launch with --num_processes 2 or more.")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of what TRL sets
        load_quietly()
        from rlhf_trl.compare.launch.check_launch import check_launch

        check_launch(args.config, args.recipe_options, args.limit)

    recipe(check)


def _compare(args: argparse.Namespace) -> None:
    from rlhf_trl.compare import command

    command.run(args)


if __name__ == "__main__":
    main()
