"""Documents from the standard library's sources."""

from workshop.demo.library import code_documents, prose_documents, source_files

LONG_PROSE = "This function does many things, and it is described at length. " * 5
SOURCE = f'''import sys


def described():
    """{LONG_PROSE}"""
    return sys.path


def short():
    return 1


def with_session():
    """{LONG_PROSE}

    >>> with_session()
    """


topics = {{"assert": "{LONG_PROSE}"}}
'''


def test_code_is_cut_at_two_blank_lines_and_short_blocks_are_left_out() -> None:
    starts = [document.split("\n")[0][:18] for document in code_documents(SOURCE)]
    assert starts == ["def described():", "def with_session()", 'topics = {"assert"']


def test_prose_is_long_docstrings_and_topics_without_interpreter_sessions() -> None:
    assert prose_documents(SOURCE) == [LONG_PROSE.strip(), LONG_PROSE.strip()]


def test_source_files_are_the_librarys_own_in_a_fixed_order() -> None:
    files = source_files()
    names = [path.name for path in files]
    assert "argparse.py" in names
    assert files == sorted(files)
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)
