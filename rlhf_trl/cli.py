"""The `rlhf-trl` command; each subcommand is a few lines over the package."""

import argparse
import json
import sys
from collections.abc import Sequence
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
    race = commands.add_parser(
        "race",
        help="train algorithms side by side: table and figure",
        epilog="Every other option goes to the recipe, as in --max_steps 200.",
        allow_abbrev=False,
    )
    race.add_argument(
        "--algorithms",
        required=True,
        help="names of rows or of configs in configs/tiny, separated by commas",
    )
    race.add_argument("--seeds", type=int, default=3, help="runs per algorithm (3)")
    race.add_argument("--config", help="one config for all, instead of configs/tiny/NAME.yaml")
    race.add_argument("--output_dir", default="outputs/race", help="(outputs/race)")
    race.add_argument("--jobs", type=int, default=1, help="runs side by side, a thread each (1)")
    race.add_argument(
        "--on_policy",
        action="store_true",
        help="one update per generation; by default two (num_iterations 2), since with one no "
        "ratio leaves 1 and most losses coincide",
    )
    race.set_defaults(run=_race)
    args, args.rest = parser.parse_known_args(argv)
    if args.rest and args.run is not _race:
        parser.error(f"unknown arguments: {' '.join(args.rest)}")
    try:
        args.run(args)
    except InputError as error:
        sys.exit(f"error: {error}")


def _algorithms(args: argparse.Namespace) -> None:
    from rlhf_trl.algorithms import ALGORITHMS
    from rlhf_trl.compare import explain

    if args.json:
        names = [args.name] if args.name else list(ALGORITHMS)
        print(json.dumps([explain.describe(name) for name in names], indent=2))
    else:
        print(explain.explain(args.name) if args.name else explain.table())


def _race(args: argparse.Namespace) -> None:
    from rlhf_trl.algorithms import algorithm
    from rlhf_trl.algorithms import names as names_of
    from rlhf_trl.run.race import race

    names = [name.strip() for name in args.algorithms.split(",")]
    if args.seeds < 1:
        raise InputError(f"--seeds is {args.seeds}; write 1 or more.")
    for name in names:
        if args.config or not Path(f"configs/tiny/{name}.yaml").is_file():
            algorithm(name)
    reused = any(name in names_of("policy_gradient") for name in names)
    extra = [*(["--num_iterations", "2"] if reused and not args.on_policy else []), *args.rest]
    folder = Path(args.output_dir)
    print(race(names, args.seeds, folder, config=args.config, jobs=args.jobs, extra=extra))
    print(f"\nrace.md, race.json and race.png are in {folder}")


if __name__ == "__main__":
    main()
