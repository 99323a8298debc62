"""From the current folder runs what the user names, in workers too, and no other module that lies there."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OPTIONAL = ("bottleneck", "numexpr", "cupy", "jax", "uvloop", "simplejson", "functorch", "usercustomize")
NAMED = """
import beside_it
import colorsys, numpy, pandas  # first imported here

def answer(word):
    return f"{word} {beside_it.WORD} {numpy.array([1]).sum()}"
"""
PROGRAM = """
import json, os, sys
from functools import partial
from xmil.core.registry import load_function
from xmil.execute.workers import Workers, process
from tests.runs.test_current_folder import listening_addresses

if __name__ == "__main__":
    kind, named = sys.argv[1:]
    worker = partial(load_function, named, kind="model")
    outcomes, addresses = [], []
    for outcome in process(["a", "b"], worker, Workers(kind, workers=2)):
        outcomes.append([outcome.item, outcome.result, outcome.error])
        addresses = addresses or listening_addresses(os.getpid())
    print(json.dumps({"outcomes": sorted(outcomes), "addresses": addresses}))
"""


def plant(folder: Path, names: set[str]) -> Path:
    """Write modules that leave a mark when they run; return the mark."""
    mark = folder / "mark"
    for name in names:
        code = f"open({str(mark)!r}, 'a').write('{name} ')\nraise ImportError('trap')\n"
        (folder / f"{name}.py").write_text(code)
    return mark


def installed() -> set[str]:
    """The names of all modules that can be imported, xmil's and Python's own among them."""
    return {module.name for module in pkgutil.iter_modules() if module.name.isidentifier()} - {"tests"}


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONSAFEPATH", None)
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True)


def listening_addresses(pid: int) -> list[str]:
    """The addresses on which a process and its descendants listen, by Linux's tables."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            raw = bytes.fromhex(words[1].partition(":")[0])
            address = ip_address(b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4)))
            if words[3] == "0A":  # it listens
                sockets[f"socket:[{words[9]}]"] = str(getattr(address, "ipv4_mapped", None) or address)
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    links = [link for one in family for link in Path(f"/proc/{one}/fd").glob("*")]
    return sorted({sockets[target] for link in links if (target := _target(link)) in sockets})


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A current folder with a module of the user's, one beside it, and traps for all others."""
    folder = tmp_path / "current"
    folder.mkdir()
    (folder / "named.py").write_text(NAMED)
    (folder / "beside_it.py").write_text("WORD = 'beside'\n")
    return folder


def run_workers(folder: Path, kind: str, named: str) -> dict[str, Any]:
    program = folder.parent / "program.py"
    program.write_text(PROGRAM)
    mark = plant(folder, {*installed(), *OPTIONAL})
    done = python(str(program), kind, named, cwd=folder)
    assert not mark.exists(), mark.read_text()
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["outcomes"] == [["a", "a beside 1", None], ["b", "b beside 1", None]]
    return result


@pytest.mark.parametrize("named", ["named:answer", "named.py:answer"])
def test_workers_run_what_was_named_and_nothing_else(folder: Path, named: str) -> None:
    run_workers(folder, "local", named)


@pytest.mark.skipif(sys.platform != "linux", reason="sockets are read from /proc")
def test_a_ray_of_ours_runs_what_was_named_and_listens_on_this_machine_only(folder: Path) -> None:
    pytest.importorskip("ray")
    addresses = run_workers(folder, "ray", "named:answer")["addresses"]
    assert addresses
    assert all(ip_address(address).is_loopback for address in addresses)


def test_a_command_that_the_demonstration_starts(folder: Path) -> None:
    mark = plant(folder, installed())
    program = folder.parent / "program.py"
    program.write_text(
        "from pathlib import Path\nfrom xmil.cli import demo\n"
        "print(demo._run([['--version'], ['inspect', 'absent']], True, Path('log.txt')))\n"
    )
    done = python(str(program), cwd=folder)
    assert not mark.exists(), mark.read_text()
    assert (done.stdout, done.returncode) == ("[0, 2]\n", 0), done.stderr


@pytest.mark.parametrize("module", ["xmil", "xmil.cli"])
def test_python_m_imports_what_is_installed(folder: Path, module: str) -> None:
    """Python itself imports `xmil` and a few of its own modules before the program can prevent it."""
    mark = plant(folder, {"numpy", "torch", "typer", "rich", "pandas", "pydantic", *OPTIONAL})
    done = python("-m", module, "inspect", "absent", cwd=folder)
    assert not mark.exists(), mark.read_text()
    assert done.returncode == 2, done.stderr
