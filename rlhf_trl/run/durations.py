"""Durations for people, and what a run spent its time on."""

from collections.abc import Mapping

PHASES = ("generation", "scoring", "update", "evaluation", "saving", "other")
"""Where the time of a training goes: answers, their rewards, the rest of a step, and between."""


def readable(seconds: float) -> str:
    """Return a duration in one or two units: "3.4 s", "34 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def shares(phases: Mapping[str, float]) -> str:
    """Return what share each phase has of all, as "generation 45 %, update 55 %".

    A phase below half a percent is left out. `phases` are seconds; none at all give "".
    """
    total = sum(phases.values())
    parts = [
        f"{name} {seconds / total:.0%}".replace("%", " %")
        for name, seconds in phases.items()
        if total and seconds / total >= 0.005
    ]
    return ", ".join(parts)
