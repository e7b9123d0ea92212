"""`rlhf-trl configs`: what ships, copies that work elsewhere, values with their sources."""

from pathlib import Path

import pytest
import yaml

from rlhf_trl.cli import main
from rlhf_trl.errors import InputError
from rlhf_trl.pipeline.plan import read_plan
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.resolved import MEANINGS, meaning

CONFIGS = Path(__file__).parent.parent / "configs"
OF_RECIPES = [path for path in sorted(CONFIGS.glob("*/*.yaml")) if path.parent.name != "pipeline"]
EXTENDING = [  # every second of those that have a base, and one that names a file
    *[path for path in OF_RECIPES if "extends:" in path.read_text()][::2],
    CONFIGS / "book" / "sft.yaml",
]


@pytest.fixture
def configs(monkeypatch, tmp_path, capsys):
    """In an empty folder, return what `rlhf-trl configs` prints."""
    monkeypatch.chdir(tmp_path)

    def configs(*words):
        main(["configs", *words])
        return capsys.readouterr().out

    return configs


def test_every_config_that_ships_has_one_line(configs):
    names = [line.split()[0] for line in configs().splitlines() if "/" in line.partition(" ")[0]]
    files = CONFIGS.glob("*/*.yaml")
    shipped = [file.relative_to(CONFIGS).with_suffix("").as_posix() for file in files]
    assert sorted(names) == sorted({*shipped} - {"tiny/base"})
    _, line = configs("tiny/grpo_chain").splitlines()
    chained = ["tiny/grpo_chain_sum", "grpo", "grpo", "outputs/sft_chain_sum/model", "chain_sum"]
    assert line.split() == [*chained, "-"]
    _, *lines = configs("tiny/sft").splitlines()
    first = ["tiny/sft", "sft", "-", "tiny_untrained", "spell_backward", "55", "s"]
    assert lines[0].split() == first


@pytest.mark.parametrize("words", [["nowhere"], ["copy", "own/dpo"], ["diff", "own/dpo"], ["show"]])
def test_other_words_are_refused_in_a_sentence(configs, words):
    with pytest.raises(SystemExit) as stop:
        configs(*words)
    assert str(stop.value).startswith("error: ")


@pytest.mark.parametrize("words", [["show", "own/gropo"], ["diff", "own/dpo", "own/gropo"]])
def test_a_name_that_no_config_has_gets_a_hint(configs, words):
    with pytest.raises(SystemExit, match=r"own/gropo is neither .* \(did you mean 'own/grpo'\?\)"):
        configs(*words)


def test_a_folder_lists_its_own_configs(configs):
    names = {line.split()[0] for line in configs("own").splitlines()[1:]}
    assert names == {f"own/{file.stem}" for file in (CONFIGS / "own").glob("*.yaml")}


def test_a_copy_never_overwrites(configs):
    Path("mine.yaml").write_text("mine\n")
    with pytest.raises(SystemExit, match=r"error: copy: mine\.yaml exists; name another file\."):
        configs("copy", "own/dpo", "mine.yaml")
    assert Path("mine.yaml").read_text() == "mine\n"


def test_a_copy_of_a_config_without_a_base_is_the_same_text(configs):
    configs("copy", "own/dpo", "new/mine.yaml")
    assert Path("new/mine.yaml").read_text() == (CONFIGS / "own/dpo.yaml").read_text()


def test_every_copy_says_what_its_original_does_without_a_base(configs):
    assert len(EXTENDING) > 20
    for path in EXTENDING:
        target = Path("copies", path.parent.name, path.name)
        configs("copy", path.relative_to(CONFIGS).with_suffix("").as_posix(), str(target))
        assert "extends" not in yaml.safe_load(target.read_text())
        copied, original = read_config(target), read_config(path)
        file = original.get("samples", {}).get("file")
        if file is not None:
            assert Path(copied["samples"].pop("file")).samefile(CONFIGS.parent / file)
            original["samples"].pop("file")
        assert copied == original, path


def test_a_copy_keeps_comments_of_the_config_and_of_its_base(configs):
    configs("copy", "tiny/drgrpo", "mine.yaml")
    lines = Path("mine.yaml").read_text().splitlines()
    assert lines[0].startswith("# Dr. GRPO (chapter 6): rewards are centered only")
    assert "lr_scheduler_type: linear # to 0; constant ends about two points lower" in lines
    assert "algorithm: drgrpo" in lines


def test_a_copied_pipeline_and_a_copied_launch_name_files_that_are_there(configs):
    configs("copy", "pipeline/tiny", "elsewhere/mine.yaml")
    stages = read_plan("elsewhere/mine.yaml").stages
    assert Path(stages["dpo"].config).samefile(CONFIGS / "tiny/dpo.yaml") and len(stages) == 6
    configs("copy", "pipeline/demo", "demo.yaml")  # which extends another
    stages = read_plan("demo.yaml").stages.values()
    assert stages and all(Path(stage.config).is_absolute() for stage in stages)
    configs("copy", "accelerate/zero3_offload", "mine.yaml")
    details = yaml.safe_load(Path("mine.yaml").read_text())["deepspeed_config"]
    assert Path(details["deepspeed_config_file"]).samefile(
        CONFIGS / "accelerate/zero3_offload.json"
    )


def test_any_command_takes_a_config_that_ships_by_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert read_config("tiny/drgrpo") == read_config(CONFIGS / "tiny" / "drgrpo.yaml")
    assert read_plan("pipeline/tiny").stages.keys() >= {"reward", "dpo"}
    Path("tiny").mkdir()
    Path("tiny/drgrpo").write_text("seed: 3\n")
    assert read_config("tiny/drgrpo") == {"seed": 3}
    with pytest.raises(InputError, match="tiny/other: the config cannot be read"):
        read_config("tiny/other")


def tables(text):
    """Return the lines of printed tables as lists of cells, by the heading above each."""
    sections = {}
    for part in text.strip().split("\n\n"):
        heading, _, *lines = [*part.splitlines(), ""]
        cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
        sections[heading] = [line for line in cells if line]
    return sections


def test_grpo_and_drgrpo_differ_in_their_loss_alone(configs):
    sections = tables(configs("diff", "tiny/grpo", "tiny/drgrpo"))
    assert sections["loss"] == [
        ["algorithm", "grpo", "drgrpo"],
        ["loss_type", "grpo", "dr_grpo"],
        ["row.advantage", "group_standardized", "group_centered"],
        ["row.aggregation", "sequence_mean", "fixed_length"],
        ["scale_rewards", "group", "none"],
    ]
    assert sections["reports and the rest"] == [["output_dir", "outputs/grpo", "outputs/drgrpo"]]
    assert not {"model", "data", "length", "optimizer", "machine"} & sections.keys()


def test_two_files_differ_in_resolved_values_by_meaning(configs):
    own = (CONFIGS / "own/dpo.yaml").read_text()
    Path("a.yaml").write_text(own)
    changed = own.replace("max_length: 1024", "max_length: 512").replace("pairs.jsonl", "my.jsonl")
    # what is written as it is by default is no difference
    Path("b.yaml").write_text(f"{changed}beta: 0.1\nadam_beta1: 0.9\n")
    Path("c.yaml").write_text("extends: b.yaml\nalgorithm: ipo\nbeta: !unset\nuse_cpu: true\n")
    assert configs("diff", "a.yaml", "a.yaml").strip().endswith("resolve to the same values")
    sections = tables(configs("diff", "a.yaml", "b.yaml"))
    sections.pop(next(name for name in sections if name.startswith("what it does")))
    assert sections == {
        "data": [["dataset.path", "pairs.jsonl", "my.jsonl"]],
        "length": [["max_length", "1024", "512"]],
    }
    sections = tables(configs("diff", "b.yaml", "c.yaml"))
    assert ["algorithm", "dpo", "ipo"] in sections["loss"]
    assert ["row.loss", "dpo", "ipo"] in sections["loss"]


def test_configs_of_two_recipes_differ_where_either_says_something(configs):
    sections = tables(configs("diff", "tiny/grpo", "tiny/dpo"))
    assert ["dataset.pairs", "unset", "on_policy"] in sections["data"]
    assert ["num_generations", "8", "unset"] in sections["data"]
    assert not [line for lines in sections.values() for line in lines if "vllm" in line[0]]


def test_show_names_the_source_of_every_value(configs):
    words = ["--max_steps", "7", "--dataset.size", "64", "--no_bf16_full_eval"]
    sections = tables(configs("show", "tiny/drgrpo", *words))
    found = {line[0]: line[1:] for lines in sections.values() for line in lines}
    own, grpo, base = (
        str(CONFIGS / "tiny" / f"{name}.yaml") for name in ("drgrpo", "grpo", "base")
    )
    expected = {
        "algorithm": ['"drgrpo"', f"file {own}"],
        "output_dir": ['"outputs/drgrpo"', f"file {own}"],
        "formulation": ['"chapter"', f"base {grpo}"],
        "learning_rate": ["0.0007", f"base {grpo}"],
        "num_generations": ["8", f"base {grpo}"],
        "adam_beta2": ["0.99", f"base {grpo}"],
        "reward_weights": ["[1.0, 0.5]", f"base {grpo}"],
        "model_name_or_path": ['"tiny"', f"base {base}"],
        "dataset.eval_size": ["256", f"base {base}"],
        "dataset.seed": ["0", f"base {base}"],
        "use_cpu": ["true", f"base {base}"],
        "save_strategy": ['"no"', f"base {base}"],
        "max_steps": ["7", "command line"],
        "dataset.size": ["64", "command line"],
        "bf16_full_eval": ["false", "command line"],
        "epsilon": ["0.2", "drgrpo (chapter)"],
        "scale_rewards": ['"none"', "drgrpo (chapter)"],
        "row.aggregation": ['"fixed_length"', "drgrpo (chapter)"],
        "weight_decay": ["0.0", "default"],
        "num_iterations": ["1", "default"],
        "dataset.slice": ["null", "default"],
        "refuse_non_finite": ["true", "default of recipes"],
        "generation_batch_size": ["128", "follows from others"],
        "lora_r": ["16", "default"],
    }
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("epsilon_high", "loss"),
        ("row.ratio", "loss"),
        ("lora_alpha", "model"),
        ("dataset.eval_size", "data"),
        ("reward_funcs", "data"),
        ("max_completion_length", "length"),
        ("per_device_train_batch_size", "length"),
        ("learning_rate", "optimizer"),
        ("vllm_gpu_memory_utilization", "machine"),
        ("activation_checkpointing", "machine"),
        ("load_best_model_at_end", "reports and the rest"),
    ],
)
def test_a_field_has_the_first_meaning_that_fits(key, name):
    assert meaning(key) == name and name in MEANINGS
