"""One set of settings, resolved into those of each part."""

import pytest
from pydantic import ValidationError

from cluster.settings import DEMO_NAME, Settings


def test_the_demo_pair_is_served_in_float32_when_no_model_is_named():
    settings = Settings().resolved()
    assert settings.target_engine().dtype == "float32"
    assert settings.target_engine().model.endswith("models/demo/target")
    assert settings.draft_engine().model.endswith("models/demo/draft")
    assert settings.gateway().model == DEMO_NAME


def test_a_target_alone_is_drafted_for_by_ngrams():
    settings = Settings(target="folder").resolved()
    assert (settings.draft, settings.gateway().drafter) == (None, "ngram")
    assert (settings.gateway().model, settings.target_engine().dtype) == ("folder", "auto")


def test_what_is_named_is_kept():
    settings = Settings(target="t", draft="d", name="n", dtype="bfloat16", target_threads=3).resolved()
    assert (settings.name, settings.drafter) == ("n", "model")
    assert (settings.target_engine().threads, settings.draft_engine().dtype) == (3, "bfloat16")


@pytest.mark.parametrize(
    "wrong", [{"dept": "4"}, {"depth": "17"}, {"depth": "x"}, {"dtype": "int8"}, {"http_port": "0"}], ids=str
)
def test_a_wrong_argument_is_named(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Settings.model_validate(wrong)
