"""What the project says of itself in several places is the same everywhere."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()


def commands_of(target: str) -> list[str]:
    """What make runs for a target itself, its variables replaced."""
    variables = dict(re.findall(r"^(\w+) :?\??= (.*)$", MAKEFILE, re.M))
    (recipe,) = re.findall(rf"^{target}:[^\n]*\n((?:\t[^\n]*\n)+)", MAKEFILE, re.M)
    return [re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], line.strip()) for line in recipe.splitlines()]


def test_hooks_before_a_commit_are_what_make_lint_runs():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    targets = re.findall(r"^lint: (.*)$", MAKEFILE, re.M)[0].split()
    assert [hook["entry"] for hook in hooks] == [line for target in targets for line in commands_of(target)]
    assert not any(hook["pass_filenames"] for hook in hooks)


def test_metadata_name_only_what_is_there():
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    for name in (PROJECT["readme"], *PROJECT["license-files"]):
        assert (ROOT / name).is_file()
    for url in PROJECT["urls"].values():
        _, blob, path = url.partition("/blob/main/")
        assert not blob or (ROOT / path).is_file()


def test_changelog_tells_of_this_version():
    assert PROJECT["version"] in (ROOT / "CHANGELOG.md").read_text()


def test_make_knows_every_command_of_the_pages():
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.M))
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        assert set(re.findall(r"(?:^|`|; )make ([\w-]+)", page.read_text(), re.M)) <= targets
