"""The command itself: its version, its missing parts, its completion, its JSON."""

import builtins
import json
import sys
from importlib.metadata import version

import pytest

from outrider.cli.command_line import COMMANDS, main, parser_of
from outrider.cli.json_output import print_or_write


def test_command_line_tells_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"outrider {version('outrider')}\n"


def test_command_line_without_a_part_names_the_extra_that_has_it(monkeypatch, capsys):
    def lacking(name, *rest, **more):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, *rest, **more)

    imported = builtins.__import__
    for name in [name for name in sys.modules if name.startswith("cluster.devices")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", lacking)
    assert main(["plan", "target=demo-small"]) == 1
    assert capsys.readouterr().err == "outrider: plan needs torch: pip install 'outrider[server]'\n"


def test_command_line_without_a_module_of_its_own_is_a_defect(monkeypatch):
    monkeypatch.setitem(sys.modules, "outrider.cli.top_command", None)
    with pytest.raises(ModuleNotFoundError):
        main(["top"])


def test_completion_knows_every_command_and_its_options(capsys):
    pytest.importorskip("shtab", reason="pip install shtab")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    assert "--draft-memory" in script  # an option of plan
    assert "--learning-rate" in script  # an option of distil


@pytest.mark.parametrize("name", ["plan", "advise", "race", "top", "check", "trace"])
def test_json_option_refuses_a_file_of_settings(name, capsys):
    with pytest.raises(SystemExit):
        parser_of([name]).parse_args([name, "--json", "outrider.yaml"])
    assert "a name that ends in .json is accepted, or -" in capsys.readouterr().err


def test_print_or_write_keeps_the_standard_output_for_one_of_both(tmp_path, capsys):
    options = parser_of(["top"]).parse_args(["top", "--json", "-"])
    print_or_write("text", {"a": 1}, options.json)
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    print_or_write("text", {"a": 1}, tmp_path / "f.json")
    assert capsys.readouterr().out == "text\n"
    assert json.loads((tmp_path / "f.json").read_text()) == {"a": 1}
