"""Chat templates by name, for models without one: TRL's own, and those that TRL lacks."""

from importlib.util import find_spec
from pathlib import Path

# TRL's files; TRL trains all turns with a version of them that marks what the assistant says
OF_TRL = {"llama3": "llama3", "qwen3": "qwen3", "gemma": "gemma3"}
OURS = ("chatml", "mistral", "zephyr")  # with such marks
TEMPLATES = (*OURS, *OF_TRL)
# what a template of a family writes and those named before it do not
MARKS = {
    "llama3": "<|start_header_id|>",
    "gemma": "<start_of_turn>",
    "mistral": "[INST]",
    "chatml": "<|im_start|>",
    "zephyr": "<|assistant|>",
}


def template_file(name: str | None) -> str | None:
    """Return the file of a template that is known by this name; of others, what was given."""
    if name not in TEMPLATES or Path(name).exists():  # a folder of the user's
        return name
    if name in OF_TRL:
        folder = Path(find_spec("trl").origin).parent / "chat_templates"
        return str(folder / f"{OF_TRL[name]}.jinja")
    return str(Path(__file__).parent / "templates" / f"{name}.jinja")


def family_of(template: str) -> str | None:
    """Return the name of the template that writes the marks of this one; None: there is none."""
    return next((name for name, mark in MARKS.items() if mark in template), None)
