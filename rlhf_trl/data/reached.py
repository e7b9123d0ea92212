"""What a function's results depend on: its code, the modules it reaches, the values it holds."""

import ast
import sys
from collections.abc import Iterator
from hashlib import blake2b
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from io import BytesIO
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from datasets.utils._dill import Pickler

from rlhf_trl.errors import reason_in_short

PACKAGE = __name__.partition(".")[0]
INSTALLED = {"site-packages", "dist-packages"}  # the folders of installed packages


class _NotingPickler(Pickler):
    """Pickles a value as `datasets` does to hash it, and notes the modules that it refers to."""

    def __init__(self) -> None:
        self.written = BytesIO()
        self.modules: set[str] = set()
        super().__init__(self.written, recurse=True)

    def persistent_id(self, value: Any) -> str | None:
        """Note a module, or the module of a function or class; pickle a module as its name."""
        if isinstance(value, ModuleType):
            self.modules.add(value.__name__)
            return value.__name__
        if isinstance(value, type | FunctionType | BuiltinFunctionType) and value.__module__:
            self.modules.add(value.__module__)
        return None


def reached(function: Any) -> str:
    """Return a hash of what a function's results depend on, as far as code and values tell.

    The hash covers the function with its closure, partial arguments and attributes, and of each
    module that the function reaches, by import or through a value, the source and the values of its
    variables. Such modules are imported for this. Modules of the standard library, of installed
    packages and of `rlhf_trl` do not count, nor does what a function reads when it is called
    (files, the network, the environment).

    Raises:
        ValueError: a value cannot be hashed; the message says which.
    """
    # `waiting`: names of modules that the function reaches and that are not hashed yet
    pickled, waiting = _pickled(function, what=repr(getattr(function, "__name__", function)))
    contents: dict[str, bytes] = {}  # {name of a module: its source and its pickled variables}
    while waiting:
        name = waiting.pop()
        if name in contents or not _is_own(name):
            continue
        spec = _spec(name)
        if spec is None or spec.origin is None:  # not a module, or a folder of modules
            continue
        contents[name] = Path(spec.origin).read_bytes()
        waiting |= set(_imported(contents[name], spec.parent))
        try:
            variables = vars(import_module(name))
        except (Exception, SystemExit):  # it cannot be imported here: its source alone counts
            continue
        # names with two underscores are Python's own, such as `__file__`
        values = {key: value for key, value in variables.items() if not key.startswith("__")}
        pickled_values, modules = _pickled(values, what=f"the module {name!r}")
        contents[name] += pickled_values
        waiting |= modules
    digest = blake2b(pickled, digest_size=16)
    for name, content in sorted(contents.items()):
        digest.update(name.encode() + blake2b(content).digest())
    return digest.hexdigest()


def _pickled(value: Any, what: str) -> tuple[bytes, set[str]]:
    """Return a value pickled, and the names of modules that it refers to.

    `what` says in errors what the value is.
    """
    pickler = _NotingPickler()
    try:
        pickler.dump(value)
    except Exception as error:  # a value may raise anything
        reason = reason_in_short(error, 200)
        raise ValueError(f"{what} holds what cannot be hashed ({reason})") from error
    return pickler.written.getvalue(), pickler.modules


def _is_own(name: str) -> bool:
    """Whether a module is the user's: not Python's, an installed package's or `rlhf_trl`'s."""
    top = name.partition(".")[0]  # the package of a module
    if top in sys.stdlib_module_names or top == PACKAGE or (spec := _spec(top)) is None:
        return False
    places = [spec.origin, *(spec.submodule_search_locations or [])]
    return not any(INSTALLED & {*Path(place).parts} for place in places if place)


def _spec(name: str) -> ModuleSpec | None:
    """Return a module's spec, which says where its file is; None: there is no such module."""
    try:
        return find_spec(name)
    except ValueError as error:
        raise ValueError(f"the module {name!r} has no file") from error
    except Exception:  # `from a import b`, where b is no module, or what `a` raises
        return None


def _imported(source: bytes, package: str) -> Iterator[str]:
    """Yield the names that a module imports, inside functions, too, and their parent packages."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # not Python source: a compiled module
        return
    for node in ast.walk(tree):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            targets = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for target in targets:
            parts = target.split(".")
            yield from (".".join(parts[:n]) for n in range(1, len(parts) + 1))
