"""Entries of plugins; functions of the user's, by file and by module, from the folder one stands in."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event

import pytest

from xmil.core.errors import FileError, InputError
from xmil.core.registry import Registry, load_function, source_file


def test_a_file_and_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_it.py").write_text("SHIFT = 2\n")
    (tmp_path / "mine.py").write_text("from beside_it import SHIFT\n\ndef f(x):\n    return x + SHIFT\n")
    name = f"{tmp_path / 'mine.py'}:f"
    assert load_function(name, kind="method")(1) == 3
    assert source_file(name) == (tmp_path / "mine.py").resolve()


def test_a_module_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "module_here.py").write_text("def g():\n    return 'here'\n")
    monkeypatch.chdir(tmp_path)
    assert load_function("module_here:g", kind="model")() == "here"


@pytest.fixture
def two_folders(tmp_path, monkeypatch):
    """A folder on the path, and the current one, which holds the user's modules and traps."""
    site, here = tmp_path / "site", tmp_path / "here"
    for folder in (site, here):
        folder.mkdir()
    for trap in ("sorely_missed", "fast_sums"):
        (here / f"{trap}.py").write_text("raise RuntimeError('a trap')\n")
    lines = ["try:", "    import sorely_missed", "except ImportError:", "    SUM = 3", ""]
    (site / "fast_sums.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(here)
    yield here
    for name in ("fast_sums", "sorely_missed", "own_net", "own_parts", "own_parts.deep"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["own_net:build", "own_net.py:build"])
def test_only_the_users_modules_import_from_the_current_folder(two_folders, name):
    (two_folders / "own_net.py").write_text(
        "import own_parts.deep, fast_sums\n\ndef build():\n    return own_parts.deep.LAYERS + fast_sums.SUM\n"
    )
    parts = two_folders / "own_parts"
    parts.mkdir()
    (parts / "deep.py").write_text("LAYERS = 2\n")  # without __init__.py
    assert load_function(name, kind="model")() == 5
    assert str(two_folders) not in sys.path


def test_the_named_module_itself_is_that_of_the_current_folder(two_folders):
    """It is found before an installed one, as `python -m` does, but not another module for it."""
    with pytest.raises(InputError, match="a trap"):
        load_function("fast_sums:build", kind="model")
    with pytest.raises(InputError, match="fast_sums' is not a package"):
        load_function("fast_sums.absent:build", kind="model")


def test_a_module_that_is_imported_already_hides_a_file(two_folders):
    (two_folders / "math.py").write_text("def build():\n    return 5\n")
    with pytest.raises(InputError, match=r"math has no 'build' to call; write math\.py:build"):
        load_function("math:build", kind="model")
    assert load_function("math.py:build", kind="model")() == 5


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "changing.py"
    for value in (1, 2):  # of one length, within a second
        path.write_text(f"def f():\n    return {value}\n")
        assert load_function(f"{path}:f", kind="method")() == value


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("mine", InputError, "must look like file.py:function"),
        ("absent.py:f", FileError, "absent.py: no such file"),
        ("no_such_module_anywhere:f", InputError, "cannot be imported (ModuleNotFoundError"),
        ("math:no_such", InputError, "math has no 'no_such'"),
        ("math:pi", InputError, "math has no 'pi' to call"),
    ],
)
def test_what_cannot_be_loaded_is_named(name, error, message):
    with pytest.raises(error) as caught:
        load_function(name, kind="method")
    assert message in str(caught.value)


def test_a_file_that_fails_says_how(tmp_path):
    (tmp_path / "broken.py").write_text("raise ValueError('no luck')\n")
    with pytest.raises(InputError, match="ValueError: no luck"):
        load_function(f"{tmp_path / 'broken.py'}:f", kind="method")


STARTED, GO_ON = Event(), Event()
VERBS: Registry[str] = Registry("verb", group="xmil.test_verbs")
PLUGIN = f"""
from {__name__} import GO_ON, STARTED, VERBS
STARTED.set()
GO_ON.wait(30)
assert list(VERBS) == []
VERBS.add("greet", "hello")
"""


def test_threads_wait_for_plugins_that_another_one_loads(tmp_path, monkeypatch):
    """A look from a second thread, while the first one imports the plugin, sees its entries too."""
    (tmp_path / "slow_plugin.py").write_text(PLUGIN, encoding="utf-8")
    facts = tmp_path / "slow_plugin-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-plugin\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[xmil.test_verbs]\ngreet = slow_plugin\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(list, VERBS)
        assert STARTED.wait(30)
        second = threads.submit(list, VERBS)
        wait([second], timeout=0.2)
        GO_ON.set()
        assert first.result() == second.result() == ["greet"]
