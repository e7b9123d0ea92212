"""How much room files take."""

from pathlib import Path


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; a link has its own few."""
    paths = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return sum(file.lstat().st_size for file in paths if file.is_symlink() or file.is_file())


def readable(size: int) -> str:
    """Return a number of bytes as a text, such as 1.2 MB."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
