"""The `rlhf-trl` command; each subcommand is a few lines over the package."""

import argparse
import json
import sys
from collections.abc import Sequence

from rlhf_trl.errors import InputError


def main(argv: Sequence[str] | None = None) -> None:
    """Run `rlhf-trl`; an `InputError` ends it with its sentence and exit code 1."""
    parser = argparse.ArgumentParser(prog="rlhf-trl", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="command")
    algorithms = commands.add_parser("algorithms", help="the table of algorithms, or one in full")
    algorithms.add_argument("name", nargs="?", help="explain this algorithm")
    algorithms.add_argument("--json", action="store_true", help="the same for programs")
    algorithms.set_defaults(run=_algorithms)
    args = parser.parse_args(argv)
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


if __name__ == "__main__":
    main()
