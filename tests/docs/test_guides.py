"""How the guides' commands are read, and what counts as printed as shown."""

from pathlib import Path

import pytest

from tests.support.guides import DOCS, GUIDES, Command, agrees, commands, terminal

PAGE = """
```
$ not run
```

```console
$ cat > a.txt <<'END'
> one
> END
$ wc -l a.txt
1 a.txt
```

```console
$ true
```
"""


def test_commands_stand_after_dollars_in_blocks_of_a_console() -> None:
    assert [*commands(PAGE)] == [
        Command("cat > a.txt <<'END'\none\nEND"),
        Command("wc -l a.txt", ("1 a.txt",)),
        Command("true"),
    ]
    with pytest.raises(ValueError, match="a command begins with"):
        [*commands("```console\nno command\n```\n")]


@pytest.mark.parametrize("name", GUIDES)
def test_guide_has_commands(name: str) -> None:
    assert [*commands((DOCS / name).read_text())]


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("a   b\n\n", ["a b"]),
        ("draft 0.25\n", ["draft 0.71"]),
        ("p = 1, 3 of 4\n", ["p = 0.5, 3 of 4"]),
        ("by 1.2e-06 nats\n", ["by 3e-08 nats"]),
        ("took 34 s.\n", ["took ... s."]),
        ("a\nb\nc\n", ["a", "...", "c"]),
        ("a\nc\n", ["a", "...", "c"]),
    ],
)
def test_output_that_may_differ_is_accepted(printed: str, shown: list[str]) -> None:
    assert agrees(printed, shown)


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("a b\n", ["a"]),
        ("a\nb\n", ["a"]),
        ("a\n", ["a", "b"]),
        ("draft none\n", ["draft 0.71"]),
        ("24 of 25\n", ["25 of 25"]),
        ("b\nc\n", ["a", "...", "c"]),
    ],
)
def test_output_that_may_not_differ_is_refused(printed: str, shown: list[str]) -> None:
    assert not agrees(printed, shown)


def test_exports_of_the_shell_stay_as_they_were(tmp_path: Path) -> None:
    with terminal(tmp_path) as shell:
        shell.run(Command("export DRAWN=$RANDOM$RANDOM$RANDOM OTHER=1"))
        shell.run(Command("echo $DRAWN > first; echo $DRAWN $OTHER"))
        shell.run(Command("[ -n $DRAWN ] && echo $DRAWN | cmp - first && echo $OTHER", ("1",)))


def test_commands_run_in_one_folder_and_a_failure_is_told(tmp_path: Path) -> None:
    with terminal(tmp_path) as shell:
        for command in commands(PAGE):
            shell.run(command)
        with pytest.raises(AssertionError, match="wc -l"):
            shell.run(Command("wc -l a.txt", ("2 a.txt",)))
        with pytest.raises(AssertionError, match="nowhere"):
            shell.run(Command("cat nowhere"))
