"""`rlhf-trl doctor`: each line is ok or says what to do, and only what stops training fails."""

import importlib.metadata
import subprocess
from types import SimpleNamespace
from urllib.error import URLError

import psutil
import pytest
import torch
from huggingface_hub import constants

from rlhf_trl.cli import main
from rlhf_trl.run import doctor
from rlhf_trl.run.doctor import Finding


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine on which all is in order, in an empty folder; it launches no processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=50_000_000_000)
    )
    free = SimpleNamespace(available=8_000_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    printed = SimpleNamespace(stdout="together: [0, 1]\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: printed)
    return monkeypatch


def lines(capsys):
    """Return the code and what `rlhf-trl doctor` says, by subject."""
    code = 0
    try:
        main(["doctor"])
    except SystemExit as stop:
        code = stop.code
    said = {line[:15].strip(): line[15:] for line in capsys.readouterr().out.splitlines()}
    return code, said


def test_a_machine_in_order_is_ok_in_every_line(machine, capsys):
    machine.setattr(doctor.shutil, "which", lambda name: None if "nvidia" in name else name)
    code, said = lines(capsys)
    assert code == 0
    said.pop("tested with", None)  # what is installed here may be newer
    subjects = ["versions", "GPU", "bf16", "disk", "memory", "compilers", "hub", "two processes"]
    assert [*said] == subjects
    assert all(text.startswith("ok: ") for text in said.values())
    assert f"trl {importlib.metadata.version('trl')}" in said["versions"]
    assert "50 GB free" in said["disk"] and "8 GB free" in said["memory"]


def test_a_missing_or_old_package_stops_training_and_is_named(machine, capsys):
    requires = ["trl>=99", "transformers>=1", "nowhere>=2", 'peft<0.1; extra == "quant"']
    machine.setattr(importlib.metadata, "requires", lambda name: requires)
    code, said = lines(capsys)
    assert str(code).startswith("error: nothing trains here") and "versions" in code
    assert said["versions"].endswith("-m pip install 'trl>=99' 'nowhere>=2' 'peft<0.1'")


def test_an_extra_out_of_range_stops_nothing(machine, capsys):
    requires = ["trl>=1", 'peft<0.1; extra == "quant"', 'nowhere>=2; extra == "quant"']
    machine.setattr(importlib.metadata, "requires", lambda name: requires)
    code, said = lines(capsys)
    assert code == 0 and said["versions"].endswith("pip install 'peft<0.1'")


def test_versions_other_than_those_tested_are_told_and_stop_nothing(machine, capsys, tmp_path):
    version = importlib.metadata.version("trl")
    (tmp_path / "constraints.txt").write_text(f"# tested\ntrl==0.0.1\npeft=={version}.post9\n")
    machine.setattr(doctor, "home", lambda: tmp_path)
    machine.setattr(importlib.metadata, "requires", lambda name: ["trl>=1", "datasets>=1"])
    code, said = lines(capsys)
    assert code == 0 and said["tested with"].startswith(f"others: trl {version} (0.0.1); ")


def test_what_only_slows_or_narrows_training_stops_nothing(machine, capsys):
    there = {"nvidia-smi": "/bin/nvidia-smi"}
    machine.setattr(doctor.shutil, "which", there.get)
    machine.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000_000))
    machine.setattr(constants, "HF_HUB_OFFLINE", False)

    def unreachable(request, timeout):
        raise URLError("no network")

    machine.setattr(doctor, "urlopen", unreachable)
    printed = SimpleNamespace(stdout="", stderr="RuntimeError: no route to host\n")
    machine.setattr(subprocess, "run", lambda *args, **options: printed)
    code, said = lines(capsys)
    assert code == 0
    assert "does not see it; install a build of torch" in said["GPU"]
    assert said["disk"].startswith("5 GB free") and "make room" in said["disk"]
    assert (
        said["compilers"].startswith("c++ and ninja missing") or "not needed" in said["compilers"]
    )
    assert "no network" in said["hub"] and "set HF_HUB_OFFLINE=1" in said["hub"]
    assert "no route to host" in said["two processes"]


@pytest.mark.parametrize(("free", "stops"), [(100_000_000, True), (3_000_000_000, False)])
def test_only_no_room_at_all_stops_training(machine, capsys, free, stops):
    machine.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    machine.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    code, said = lines(capsys)
    assert bool(code) == stops
    assert "make room" in said["disk"] and "end other programs" in said["memory"]


def test_gpus_that_cannot_talk_to_each_other_stop_training(machine, capsys):
    machine.setattr(torch.cuda, "is_available", lambda: True)
    machine.setattr(torch.cuda, "device_count", lambda: 2)
    machine.setattr(torch.cuda, "get_device_name", lambda: "A100")
    machine.setattr(torch.cuda, "mem_get_info", lambda: (70e9, 80e9))
    machine.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    commands = []

    def run(command, **options):
        commands.append(command)
        raise subprocess.TimeoutExpired(command, 120)

    machine.setattr(subprocess, "run", run)
    code, said = lines(capsys)
    assert "two processes" in str(code) and "did not end within 120 s" in said["two processes"]
    assert said["GPU"].startswith("ok: 2 x A100, 70 of 80 GB free")
    assert said["bf16"].endswith("write bf16: false, which is true by default")
    (command,) = commands
    assert any(word.endswith("ddp.yaml") for word in command)


def test_a_line_is_ok_or_says_what_to_do():
    assert str(Finding("disk", "5 GB free")) == "disk           ok: 5 GB free"
    assert str(Finding("disk", "5 GB free", "make room")) == "disk           5 GB free; make room"


@pytest.mark.promise
@pytest.mark.multiprocess
def test_two_processes_of_this_machine_find_each_other():
    finding = doctor._two_processes()
    assert finding.text.startswith("found each other") and not finding.remedy
