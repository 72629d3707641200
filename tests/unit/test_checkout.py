"""A checkout that is whole: the links that give the folders their import names, and one name for every file."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("api", "comm", "deploy", "elastic", "worker")
SKIPPED = {".git", ".venv", "build", "dist", "__pycache__", "src"}
FORBIDDEN = (
    "maybe_make_prepare_finalize",
    "select_gemm_impl",
    "maybe_init_modular_kernel",
    "prepare_new_worker",
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_are_links(folder: str) -> None:
    link = ROOT / "src" / "moeray" / folder
    assert link.is_symlink(), (
        f"src/moeray/{folder} is not a link to ../../{folder}: this checkout lost its links. "
        "Check out with core.symlinks=true (on Windows: in developer mode), and copy or unpack with links kept."
    )
    assert os.readlink(link) == f"../../{folder}", f"src/moeray/{folder} must be the relative link ../../{folder}"
    assert (ROOT / folder / "__init__.py").is_file()


def source_files() -> Iterator[Path]:
    for directory, names, files in os.walk(ROOT):
        names[:] = [name for name in names if name not in SKIPPED and not name.endswith("_cache")]
        yield from (Path(directory) / file for file in files)


def test_nothing_names_the_second_initialisation_pass() -> None:
    me = Path(__file__).resolve()
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in source_files()
        if path != me and path.suffix in {".py", ".md", ".toml", ".cpp", ".h", ".sh", ".yaml"}
        for name in FORBIDDEN
        if name in path.read_text(errors="replace")
    ]
    assert not found, "kernels are built while weights are processed and nowhere else"


def test_test_files_have_names_of_their_own() -> None:
    """Without packages in the tests' folders, two files of one name could not be told apart."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize(
    "module",
    [
        "moeray.api.server",
        "moeray.elastic.controller",
        "moeray.deploy.cli",
        "moeray.deploy.supervisor",
        "moeray.deploy.frontend",
        "moeray.deploy.actors",
        "moeray.comm.sockets",
        "moeray.worker.config",
        "moeray.worker.messages",
    ],
)
def test_torch_stays_out(module: str) -> None:
    """The server, the controller and the command line start without torch, and so in a fraction of its time."""
    code = f"import sys, {module}; print(*(n for n in ('torch', 'transformers') if n in sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split(), f"importing {module} loads {done.stdout.strip()}"


def test_the_version_is_stated_once() -> None:
    import moeray

    stated = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert stated is not None
    assert stated[1] == moeray.__version__
