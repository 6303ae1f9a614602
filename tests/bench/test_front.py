"""`python -m bench NAME`: every benchmark has one, and no other is taken."""

import ast
import subprocess
from pathlib import Path

import pytest

from bench import __main__ as front

BENCH = Path(front.__file__).parent
NAMES = [*front.BENCHMARKS, *front.ALONE]


def has_main(file: Path) -> bool:
    body = ast.parse(file.read_text()).body
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in body)


def test_benchmark_names_cover_every_module_with_a_main() -> None:
    modules = [*BENCH.glob("*.py"), *(path.parent for path in BENCH.glob("*/__init__.py"))]
    with_main = {
        path.stem for path in modules if has_main(path if path.is_file() else path / "__init__.py")
    } - {"__main__"}
    assert sorted(NAMES) == sorted(with_main)


@pytest.mark.parametrize("name", NAMES)
def test_main_with_a_name_runs_its_module_with_the_options_after_it(name: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        front.main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m bench {name} ")


@pytest.mark.parametrize("name", NAMES)
def test_main_with_an_unknown_option_is_refused(name: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        front.main([name, "--no-such-option"])
    assert ended.value.code == 2
    assert f"python -m bench {name}: error: " in capsys.readouterr().err


def test_main_with_an_unknown_name_is_refused_with_the_list(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        front.main(["no_such_benchmark"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "no_such_benchmark" in said
    assert all(name in said for name in NAMES)


def test_help_lists_names_with_their_titles(capsys) -> None:
    with pytest.raises(SystemExit):
        front.main(["--help"])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    for name, title in (front.BENCHMARKS | front.ALONE).items():
        assert [name, title] in lines


def test_main_without_a_name_runs_each_benchmark_in_a_process_until_one_fails(monkeypatch) -> None:
    run = []

    def noted(command, check, preexec_fn):
        run.append(command[1:])
        if command[-1] == "engine":
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", noted)
    with pytest.raises(subprocess.CalledProcessError):
        front.main([])
    names = [*front.BENCHMARKS]
    assert run == [["-m", "bench", name] for name in names[: names.index("engine") + 1]]
