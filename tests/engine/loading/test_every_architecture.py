"""Every decoder of transformers that can be made small: right ones pass the self-check, others do not."""

import copy
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import outrider.engine.loop.load
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.settings import EngineSettings
from tests.support.small_models import small

ENCODERS = (
    "bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm xlm-roberta"
)
ATTEND_OTHERWISE = "diffllama doge nemotron hy_v4 deepseek_v32 glm_moe_dsa axk2 hrm_text dory"
# transformers has the window in its mask alone, or in its attention alone.
WINDOW_UNKNOWN = "phimoe olmoe"
REFUSED = {*ENCODERS.split(), "xlm-roberta-xl", *ATTEND_OTHERWISE.split(), *WINDOW_UNKNOWN.split()}


NOT_ROUTED = ("does not route its attention", "keep no keys and values")


def refusal(model: Any, kind: str) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outrider.engine.loop.load, "load_model", lambda settings: model)
        try:
            load_forward_pass(EngineSettings(model=kind, block_size=8, cache_memory=2**22, device="cpu"))
        except UnsupportedModelError as error:
            return str(error)
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_right_models_pass_and_wrong_ones_are_refused(kind: str) -> None:
    model = small(kind)
    if model is None:
        pytest.skip("no small model of this kind")
    for seed in (0, 1):
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim >= 2:
                    weight.normal_(0, 0.15)
        for dtype in (torch.float32, torch.bfloat16):
            message = refusal(copy.deepcopy(model).to(dtype), kind)
            if kind in REFUSED:
                assert message is not None
                assert kind in message
            else:
                assert message is None or any(reason in message for reason in NOT_ROUTED)
