"""`xmil doctor`, help, panels and shell completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import typer.main

from xmil.cli import doctor, main
from xmil.cli._app import PANELS, build, command_panels
from xmil.demo import selfcheck

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def started(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
    return subprocess.run(
        [sys.executable, "-m", "xmil.cli", *arguments], env=env, capture_output=True, text=True
    )


def test_doctor_passes_here(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("doctor", "--json", capsys=capsys)
    report = json.loads(out)
    assert (code, err, report["problems"]) == (0, "", [])
    assert report["self_check"]["passed"]
    assert report["self_check"]["pairs"] == 28
    assert report["devices"][0]["device"] == "cpu"
    code, out, _ = run("doctor", "--no-check", capsys=capsys)
    assert code == 0
    assert "Self-check: not requested" in out
    for name in doctor.EXTRAS:
        assert f"\n  {name} " in out


def names(requirements: list[str]) -> set[str]:
    return {requirement.split(">")[0].split("[")[0] for requirement in requirements}


def test_doctor_knows_every_package_of_the_project() -> None:
    assert set(doctor.REQUIRED) == names(PROJECT["dependencies"])
    optional = {k: names(v) for k, v in PROJECT["optional-dependencies"].items() if k not in ("dev", "docs")}
    assert {name: set(packages) for name, (_, packages) in doctor.EXTRAS.items()} == optional


def test_a_wrong_score_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = selfcheck._model

    def disturbed(name: str) -> object:
        model = weights(name)
        next(model.parameters()).data[0] += 0.01
        return model

    monkeypatch.setattr(selfcheck, "_model", disturbed)
    code, out, _ = run("doctor", capsys=capsys)
    assert code == 1
    assert "Self-check: failed" in out
    assert "self-check: scores differ: attnmil lrp" in out


def test_missing_and_broken_packages_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "broken_on_import.py").write_text("raise RuntimeError('operator torchvision::nms is lost')")
    monkeypatch.syspath_prepend(str(tmp_path))
    packages = {"numpy": "broken_on_import", "no-such-package": "none"}
    monkeypatch.setitem(doctor.EXTRAS, "zarr", ("a test", packages))
    monkeypatch.setitem(doctor.REQUIRED, "rich", "broken_on_import")
    code, out, _ = run("doctor", "--no-check", capsys=capsys)
    assert code == 1
    assert "without no-such-package: pip install 'xmil[zarr]'" in out
    assert "does not import: RuntimeError: operator torchvision::nms is lost; install builds" in out
    assert "rich: RuntimeError" in out


def test_the_stored_values_are_those_of_the_formula() -> None:
    stored = json.loads((ROOT / "src/xmil/demo/selfcheck.json").read_text("utf-8"))
    assert list(selfcheck.values()) == list(stored)


def test_every_command_has_a_place_and_panels_keep_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    panels = command_panels()
    assert "More" not in panels.values(), "name new commands in PANELS"
    assert list(dict.fromkeys(panels.values())) == [p for p in PANELS if p in panels.values()]
    _, out, _ = run("--help", capsys=capsys)
    places = [out.index(f"─ {panel} ─") for panel in dict.fromkeys(panels.values())]
    assert places == sorted(places)


def test_flags_are_the_same_everywhere() -> None:
    """A flag means one thing: the same kind of value in every command, where it may be repeated or not."""
    kinds: dict[str, set[object]] = {}
    known = [getattr(import_module(f"xmil.cli.{name}"), name) for name in command_panels()]
    groups = [one for one in known if isinstance(one, typer.Typer)]
    below = [each.callback for group in groups for each in group.registered_commands]
    assert below
    for function in [*(one for one in known if one not in groups), *below]:
        for flag, kind in get_type_hints(function).items():
            one = [inner for part in get_args(kind) or [kind] for inner in get_args(part) or [part]]
            kinds.setdefault(flag, set()).update({*one} - {type(None), list})
    shared = (
        "out",
        "device",
        "seed",
        "mpp",
        "patch_size",
        "workers",
        "features",
        "cohort",
        "label",
        "engine",
    )
    assert {flag: found for flag in shared if len(found := kinds.get(flag, set())) > 1} == {}


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom xmil.cli._app import run\nrun(['--help'])\n"
        "print(*(name for name in ('torch', 'numpy', 'pandas', 'matplotlib') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    # typer looks for a shell among the parent processes, and a test may have none
    done = started("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0
    assert "_XMIL_COMPLETE" in done.stdout


def test_completion_completes() -> None:
    done = started(_XMIL_COMPLETE="complete_bash", COMP_WORDS="xmil do", COMP_CWORD="1")
    assert done.stdout.split() == ["doctor"]
    done = started(_XMIL_COMPLETE="complete_bash", COMP_WORDS="xmil doctor --js", COMP_CWORD="2")
    assert done.stdout.split() == ["--json"]


def test_every_command_reports_as_json() -> None:
    commands = dict(typer.main.get_command(build(every=True)).commands)
    for name in [name for name in commands if hasattr(commands[name], "commands")]:
        group = commands.pop(name).commands
        assert group
        commands |= {f"{name} {below}": group[below] for below in group}
    assert "study init" in commands
    lacking = [name for name in commands if not any("--json" in p.opts for p in commands[name].params)]
    assert lacking == []
