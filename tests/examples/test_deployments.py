"""Every example of a deployment is accepted, and says how it is started."""

from pathlib import Path

import pytest
import yaml

from cluster.arguments import read_settings

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "deployments").glob("*.yaml"))


def test_deployments_folder_holds_examples():
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_deployment_example_is_accepted_with_each_of_its_values(path: Path):
    settings = read_settings({"config": str(path)}).model_dump()
    given = yaml.safe_load(path.read_text())
    assert {group: subset(settings[group], values) for group, values in given.items()} == given


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_deployment_example_names_the_command_that_starts_it(path: Path):
    assert f"#   serve run cluster.app config={path.relative_to(ROOT)}\n" in path.read_text()


def subset(values, like):
    """Returns those of the values whose names occur in another dictionary, at each level."""
    if not isinstance(like, dict):
        return list(values) if isinstance(values, tuple) else values
    return {name: subset(values[name], below) for name, below in like.items()}
