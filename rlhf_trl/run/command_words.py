"""What the words of a command line mean: which key an option sets, and to what value."""

from typing import Any, get_args

from rlhf_trl.errors import InputError
from rlhf_trl.run.config_files import COMMAND_LINE, Key, Words, Written, plain
from rlhf_trl.run.config_types import describe, fits, members_of, shape_of
from rlhf_trl.run.yaml_loader import read_word

# What TRL's own parser takes for a boolean on the command line.
BOOLEAN_WORDS = {
    **dict.fromkeys(("yes", "true", "t", "y", "1"), True),
    **dict.fromkeys(("no", "false", "f", "n", "0"), False),
}


def override(written: Written, option: str, new: Any) -> None:
    """Set what one option names; dots in it lead into blocks, mappings and lists.

    Args:
        written: what files, and the options before this one, have written. It is changed.
        option: without its dashes, such as `dataset.size`.
        new: the `Words` that follow it.
    """
    head, *tail = option.split(".")
    head = head.replace("-", "_")
    if head.startswith("no_") and not tail and not new:  # a bare `--no_x` is `--x false`
        head, new = head.removeprefix("no_"), False
    path = (head, *tail)
    block, key = _holder(written, path, option)
    if tail and key == "source" and plain(block.get(key)) != plain(new):
        _keep_own(written, block, path[:-1])  # another source is another block, as in files
    block[key] = new
    written.note(path, plain(new))


def _holder(written: Written, path: Key, option: str) -> tuple[Any, str | int]:
    """Return the mapping or list that holds the key at `path`, and the key as it has it.

    Blocks on the way that no file has written are made. The `option` is for errors.
    """
    node: Any = written.values
    for depth in range(1, len(path)):
        key = _key_in(node, path[:depth], option)
        child = plain(node[key] if isinstance(node, list) else node.get(key))
        if child is None:
            child = {}
            written.note(path[:depth], child)
        node[key] = child  # also where it was words of the command line, as in `--a '{b: 1}'`
        node = child
    return node, _key_in(node, path, option)


def _key_in(node: Any, path: Key, option: str) -> str | int:
    """Return the last part of `path` as a key of the node that it leads to: an index of a list."""
    *before, name = path
    if isinstance(node, dict):
        return name
    here = f"{COMMAND_LINE}: --{option}: {'.'.join(before)} is"
    if not isinstance(node, list):
        raise InputError(f"{here} neither a mapping nor a list.")
    if not name.isdecimal() or int(name) >= len(node):
        raise InputError(
            f"{here} a list of {len(node)}, and {name!r} is no index (the first is 0)."
        )
    return int(name)


def _keep_own(written: Written, block: dict[str, Any], path: Key) -> None:
    """Remove from the block at `path` what the command line, the last writer, did not write."""
    command_line = len(written.writers) - 1
    for key in [key for key in block if written.last_writer((*path, key)) < command_line]:
        del block[key]
        written.forget((*path, key))


def value_of_words(written: Written, words: Words, kind: Any, path: Key) -> Any:
    """Return the plain value that command-line words have for a field of the type `kind`.

    Examples, where the field takes no other type than the one named:
        --bf16 -> True; no word at all is true
        --seed 7 -> 7 for an int, read as YAML; "7" for a str, the text itself
        --dataset '{size: 3}' -> {"size": 3}
        --reward_funcs a b -> ["a", "b"], and --reward_funcs a -> ["a"] for a list

    Args:
        written: what files and the command line have written, for errors.
        words: what follows the option.
        kind: the type of the field.
        path: the field's place in the config, for errors.
    """
    members = members_of(kind)
    if not words and bool not in members and Any not in members:
        written.fail(path, f"has no value; write {describe(kind)}")
    if not words or Any in members:
        return words.untyped()  # True, the word read as YAML, or a list of these
    list_types = [member for member in members if shape_of(member) in (list, tuple)]
    if len(words) == 1:
        as_yaml, as_text = read_word(words[0]), words[0]
        if bool in members and str not in members:  # for a text, "yes" and "1" are texts
            as_yaml = BOOLEAN_WORDS.get(as_text.lower(), as_yaml)
        for value in (as_yaml, as_text):
            if any(fits(value, member) for member in members):
                return value
        if not list_types:
            return as_yaml  # fits no type: the caller checks that, and refuses the value
    if not list_types:
        written.fail(path, f"takes one value and got {len(words)}: {' '.join(words)}")
    # the first argument is the type of all items: TRL has no tuple of several types
    item_kind = (get_args(list_types[0]) or (Any,))[0]
    return [value_of_words(written, Words([word]), item_kind, path) for word in words]
