"""Rules about the source that no single package can hold by itself: who imports what, what nobody imports, file sizes.

import-linter checks the direction of imports between packages too; this adds what it cannot say: that the scheduler
needs the standard library alone, and which calls and modules are barred everywhere.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("scheduler", "kernels", "model", "disagg", "api", "bench")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MAY_IMPORT = {
    "scheduler": {"scheduler"},
    "kernels": {"kernels"},
    "model": {"model", "kernels", "scheduler"},
    "api/protocol": {"api.protocol"},
    "disagg": {"disagg", "model", "scheduler", "api.protocol"},
}
# What the scheduler is given or does without: clocks, threads, event loops, files and the network.
BARRED_IN_SCHEDULER = {
    "asyncio",
    "concurrent",
    "datetime",
    "multiprocessing",
    "os",
    "socket",
    "subprocess",
    "threading",
}
# Modules that run code found in data, or that upstream has given up.
BARRED_MODULES = ("pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jax.experimental.pallas.triton")
BARRED_CALLS = {"eval", "exec", "compile", "__import__"}
MAX_LINES = 400


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), name_of(path))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Full names, `from a import b` as `a.b`, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def begins_with(module: str, prefixes: Iterable[str]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def is_command_line(path: Path) -> bool:
    return path.name == "__main__.py" or path.parent.name == "cli"


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_go_one_way(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for module in imported_modules(tree_of(path)):
            if begins_with(module, PACKAGES):
                assert begins_with(module, MAY_IMPORT[folder]), f"{name_of(path)} imports {module}"


def test_the_scheduler_needs_the_standard_library_alone():
    for path in (ROOT / "scheduler").rglob("*.py"):
        # Its command line may read files, and start processes, and still needs nothing else; the conformance kit needs
        # hypothesis, when it is used.
        barred = set() if is_command_line(path) else BARRED_IN_SCHEDULER
        for module in imported_modules(tree_of(path)):
            top = module.partition(".")[0]
            is_kit = path.parent.name == "conformance" and top == "hypothesis"
            assert is_kit or top == "scheduler" or top in sys.stdlib_module_names, f"{name_of(path)} imports {module}"
            assert top not in barred, f"{name_of(path)} imports {module}"


def test_the_scheduler_takes_time_and_chance_from_outside():
    for path in (ROOT / "scheduler").rglob("*.py"):
        for module in () if is_command_line(path) else imported_modules(tree_of(path)):
            is_type = module == "random.Random"
            assert is_type or not begins_with(module, ("random", "time")), f"{name_of(path)} imports {module}"


def test_importing_the_scheduler_loads_nothing_else():
    code = (
        "import sys, scheduler; "
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    assert [name for name in done.stdout.split() if name not in ("__main__", "__mp_main__")] == ["scheduler"]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_code_is_run_from_data(path):
    tree = tree_of(path)
    for module in imported_modules(tree):
        assert not begins_with(module, BARRED_MODULES), f"imports {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in BARRED_CALLS, f"calls {node.func.id} in line {node.lineno}"
        if isinstance(node, ast.keyword):
            assert not (node.arg == "allow_pickle" and getattr(node.value, "value", None) is not False)


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=name_of)
def test_files_are_short_and_say_what_they_own(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert not text.strip() or ast.get_docstring(tree_of(path)), "the file has no opening paragraph"


def test_no_file_has_a_vague_name():
    vague = re.compile(r"(^|/|_)(utils?|helpers?|misc|mgr)(_|\.py$|/)")
    assert [name_of(path) for path in SOURCES if vague.search(name_of(path))] == []


def test_what_is_imported_is_declared():
    """Every library that the packages import is a dependency of ours, not only of a dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {normal(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in project["dependencies"]}
    declared |= {"werkzeug", "jaxlib"}  # quart's and jax's own halves, released in step with them
    optional = {
        normal(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in project["optional-dependencies"]["conformance"]
    }
    distributions = packages_distributions()
    missing = set()
    for path in SOURCES:
        for module in imported_modules(tree_of(path)):
            top = module.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in PACKAGES:
                owners = {normal(name) for name in distributions.get(top, [top])}
                if not owners & (declared | (optional if path.parent.name == "conformance" else set())):
                    missing.add(f"{name_of(path)}: {top}")
    assert sorted(missing) == []


def normal(name: str) -> str:
    """PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()
