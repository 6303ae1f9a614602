"""A class name means one thing in the whole product."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Messages and enumerations whose name a class has too, because one is made of the other.
CONVERTED = {
    "Adapter", "AheadOutcome", "Audit", "Close", "Decode", "Draft", "Lease", "Open", "Origin",
    "PreparedTree", "Propose", "Proposed", "Rollout", "Sampling", "Score", "SparseProbs", "Step",
    "StructuredOutputs", "Timings", "TokenLogprobs", "WorkerInfo",
}  # fmt: skip
# Messages that say what an answer or a request of the HTTP API says under its name.
IN_BOTH_APIS = {"Completion", "DetokenizeRequest", "Model", "TokenizeRequest", "Usage"}
COUNTED = {"Routed"}  # messages that count events of their name
PRODUCT = ("outrider", "protos", "actors", "gateway", "cluster", "workshop", "bench", "examples")


def classes(name: str, source: str) -> dict[str, list[str]]:
    """Returns for each class the places of its definitions."""
    found = [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return {each: [name] * found.count(each) for each in found}


def product_classes() -> dict[str, list[str]]:
    """Returns for each class of the product the files that define it."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(path for package in PRODUCT for path in (ROOT / package).rglob("*.py")):
        if not path.stem.endswith(("_pb2", "_pb2_grpc")):
            name = str(path.relative_to(ROOT))
            for each, where in classes(name, path.read_text()).items():
                places[each] += where
    return dict(places)


PLACES = product_classes()


def test_class_names_of_the_product_are_defined_once() -> None:
    twice = {name: places for name, places in PLACES.items() if len(places) > 1}
    assert twice == {}


def test_messages_share_their_names_only_with_what_becomes_of_them() -> None:
    protos = "".join(path.read_text() for path in (ROOT / "protos").glob("*.proto"))
    messages = {*re.findall(r"^(?:message|enum) (\w+)", protos, re.MULTILINE)}
    assert messages & PLACES.keys() == CONVERTED | IN_BOTH_APIS | COUNTED


def test_classes_of_a_source_include_nested_ones() -> None:
    source = "class A:\n    class B:\n        pass\n\ndef f():\n    class A:\n        pass\n"
    assert classes("x.py", source) == {"A": ["x.py", "x.py"], "B": ["x.py"]}


def test_sequence_of_python_has_no_other_name() -> None:
    aliased = {
        str(path.relative_to(ROOT))
        for package in PRODUCT
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"^from collections\.abc import .*\bSequence as ", path.read_text(), re.MULTILINE)
    }
    assert aliased == set()
