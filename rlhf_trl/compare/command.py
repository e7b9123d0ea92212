"""What `rlhf-trl compare` does with its options."""

from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import version

from rlhf_trl.algorithms import formulation
from rlhf_trl.compare import as_stock, supervised, two_configs
from rlhf_trl.compare.closest import Distance, distances
from rlhf_trl.compare.drift.surface import shipped
from rlhf_trl.compare.matrix import Matrix, Result
from rlhf_trl.compare.pages import paper_index, report
from rlhf_trl.compare.pages.matrix_page import write_page
from rlhf_trl.compare.rows import ROWS
from rlhf_trl.compare.subjects import SFT, read_subject
from rlhf_trl.compare.windows.batches import BATCHES
from rlhf_trl.errors import InputError, nearest


def run(args: Namespace) -> None:
    """Compare and print what the options ask for: the paper index, configs, or the whole matrix.

    An unmet --require or an unexplained difference is an InputError.
    """
    configs = args.config or []
    if args.require and not (configs or args.trainer):
        raise InputError("--require is about --config or --trainer; give one of them")
    if args.paper_index is not None:  # "" without a path: the shipped index
        print(paper_index.page(args.paper_index or None, args.format))
    elif configs or args.trainer:
        unread = [name for name in ("batches", "quick", "page") if getattr(args, name)]
        if unread:
            subject = "--config" if configs else "--trainer"
            option = f"--{unread[0]}"
            raise InputError(f"{option} belongs to the matrix; leave out {option} or {subject}")
        if len(configs) > 1:
            _two_configs(args)
        else:
            _subject(args, configs[0] if configs else None)
    else:
        _matrix(args)


QUICK = {"accumulation", "clipped", "equal_rewards", "sampler"}
"""The batches of --quick."""


def _matrix(args: Namespace) -> None:
    """Compare the book with TRL on the fixed batches: print the results, or write the page.

    Where no algorithms are chosen, our trainers of stock formulations are also held against TRL's.
    """
    if args.page:
        if args.algorithms or args.batches or args.verbose or args.format != "table":
            raise InputError("--page writes everything; leave the other options out")
        write_page(args.page)
        return
    algorithms = _chosen("--algorithms", args.algorithms, [row.algorithm for row in ROWS])
    batches = _chosen("--batches", args.batches, [batch.name for batch in BATCHES])
    if args.quick:
        batches &= QUICK
    against_stock = [] if args.algorithms else as_stock.measure(batches)
    rows = [row for row in ROWS if row.algorithm in algorithms]
    results = Matrix().run(rows, [batch for batch in BATCHES if batch.name in batches])
    if not results:
        raise InputError(f"--batches: {args.batches} does not apply to {args.algorithms}")
    by_batch = bool(args.batches)
    # printed before anything is refused, so that what fails can be read
    print(report.render(results, against_stock, args.format, args.verbose, by_batch=by_batch))
    unequal = [as_stock.label(result.case) for result in against_stock if not result.is_same]
    if unequal:
        names = ", ".join(unequal)
        raise InputError(f"formulation trl is not the stock trainer, bit for bit: {names}")
    _check_results(results)


def _check_results(results: Sequence[Result]) -> None:
    """Refuse differences that nothing explains, and comparisons that cannot be computed.

    The verdict "cannot run" is always a fault. The verdict "not on this TRL" says that this release
    lacks a trainer, or that ours does not run on it: a fault only on the recorded release, on
    which everything runs.
    """
    unexplained = [result for result in results if not result.explained]
    if unexplained:
        names = ", ".join(f"{result.row.algorithm} on {result.batch}" for result in unexplained)
        raise InputError(f"differences that no identity explains: {names}")
    faults = ["cannot run"]
    if version("trl") == shipped()["versions"]["trl"]:
        faults.append("not on this TRL")
    reasons = [result.why for result in results if result.verdict in faults]
    if reasons:
        why = "; ".join(sorted(set(reasons)))
        raise InputError(f"{len(reasons)} comparisons cannot be computed with this TRL: {why}")


def _chosen(option: str, text: str | None, known: Sequence[str]) -> set[str]:
    """Return the names that an option lists, or all known ones where it is not given."""
    if text is None:
        return set(known)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            all_names = ", ".join(dict.fromkeys(known))
            hint = nearest(name, known)
            raise InputError(f"{option}: {name!r} is not known{hint}; known: {all_names}")
    return set(names)


def _algorithm_and_formulation(text: str) -> tuple[str, str]:
    """Read "cispo/code", or "cispo" for its chapter; what does not exist is an InputError."""
    algorithm, _, formulation_name = text.strip().partition("/")
    formulation_name = formulation_name or "chapter"
    formulation(algorithm, formulation_name)  # refuses what does not exist
    return algorithm, formulation_name


def _two_configs(args: Namespace) -> None:
    """Compare two configs with each other."""
    if len(args.config) > 2:
        raise InputError(f"--config is given {len(args.config)} times; compare takes two at most")
    for option in ("trainer", "algorithms", "require", "verbose"):
        if getattr(args, option):
            raise InputError(f"--{option} is about one --config; leave it out for two")
    if args.format == "html":
        raise InputError(
            "--format html has no place for two configs; write table, markdown or json"
        )
    print(two_configs.render(two_configs.compare_configs(*args.config), args.format))


def _subject(args: Namespace, config: str | None) -> None:
    """Print how far a config or a trainer is from algorithms.

    The algorithms are those of --algorithms; without that option, all that the trainer could
    compute. If --require names one that the config or trainer does not compute, an InputError ends
    the command.
    """
    names = [name for name in (args.algorithms or "").split(",") if name.strip()]
    compared_with = [_algorithm_and_formulation(name) for name in names]
    required = _algorithm_and_formulation(args.require) if args.require else None
    if required and compared_with and required not in compared_with:
        compared_with.append(required)
    subject = read_subject(config, args.trainer)
    if subject.base == SFT:
        if args.algorithms or args.require:
            option = "--require" if args.require else "--algorithms"
            raise InputError(f"{option} names a row, and SFT has none; leave it out")
        print(supervised.render(subject, args.format))
        return
    measured = distances(subject, compared_with)
    print(report.render_distances(subject, measured, args.format))
    if required is None:
        return
    to_required = [d for d in measured if (d.algorithm, d.formulation) == required]
    if not to_required:
        # Nothing was named by --algorithms, and the required one is none that the trainer could
        # compute. Measuring it by name raises an InputError that says why.
        to_required = distances(subject, [required])
    if not to_required[0].equal:
        raise InputError(_refusal(subject.label, "/".join(required), to_required[0]))


def _refusal(label: str, required: str, distance: Distance) -> str:
    """Say that a config or trainer is not what is required, and which changes lead there."""
    if distance.untested:
        fields = ", ".join(distance.untested)
        problem = f"{label} is not known to be {required}: {fields} may act elsewhere"
    else:
        worst = distance.worst
        error = f"relative gradient error {worst.grad_rel_error:.1e} on {worst.batch}"
        problem = f"{label} is not {required}: {error}"
    if not distance.changes:
        return f"{problem}; {distance.why}" if distance.why else problem
    suffices = distance.then is None or distance.then.agrees
    progress = "to get there" if suffices else "closer, but not there"
    return f"{problem}; {progress}: {report.as_text(distance.changes)}"
