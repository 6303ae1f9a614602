"""The example is short, runs as its page says, and keeps the first promise."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "one_process.py"
MAX_LINES = 40


def test_speculate_is_read_at_one_glance():
    functions = [node for node in ast.parse(EXAMPLE.read_text()).body if isinstance(node, ast.FunctionDef)]
    (speculate,) = (function for function in functions if function.name == "speculate")
    assert speculate.end_lineno is not None
    assert speculate.end_lineno - speculate.lineno < MAX_LINES


def test_example_with_drafts_prints_the_text_without_drafts_in_fewer_passes():
    run = subprocess.run([sys.executable, EXAMPLE], cwd=ROOT, capture_output=True, text=True, check=True)
    first, plain, second, drafted = re.fullmatch(
        r"depth 0: (\d+) passes.*?\n(.*)\n\ndepth 4: (\d+) passes.*?\n(.*)\n\n", run.stdout, re.DOTALL
    ).groups()
    assert plain == drafted
    assert int(second) < int(first) == 48
