"""Weights in 8 and 4 bit: near the original; and a draft made of them never changes a text."""

import ctypes
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO, prompts
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.linear import StoredLinear
from outrider.engine.loading import int8_product
from outrider.engine.loading.int8_product import KINDS, Int8Product, right_kind
from outrider.engine.loading.quantized import Int4Linear, Int8Linear, quantize, stored_weight, why_no_int4
from outrider.engine.loading.weights import load_model
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings, Quantization
from tests.support.allocated import allocated_weights
from tests.support.checkpoints import write_checkpoint
from tests.support.quantized_checkpoints import quantize as in_format
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda

CPU = torch.device("cpu")
BITS: list[Quantization] = ["int8", "int4"]
LAYERS = {"int8": Int8Linear, "int4": Int4Linear}
LARGEST_ERROR = {
    "int8": 0.02,
    "int4": 0.12,
}  # share of a product's length, for normally distributed weights and inputs


@pytest.fixture
def tried_anew() -> Iterator[None]:
    """What the processor can do is tried and said again, during the test and after it."""
    caches = right_kind, int8_product._say_slow, why_no_int4
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@cache
def engine(role: str, quantization: Quantization | None = None) -> Engine:
    settings = EngineSettings(
        model=str(DEMO / role), dtype="float32", threads=1, cache_memory=2**27, quantization=quantization
    )
    return Engine.from_settings(settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(192,), (1, 192), (1, 5, 192), (0, 192)])
@pytest.mark.parametrize("kind", BITS)
def test_layer_is_near_the_one_it_was_made_from(
    kind: Quantization, shape: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> None:
    check_a_layer_is_near(kind, shape, bias, dtype)


def check_a_layer_is_near(
    kind: Quantization, shape: tuple[int, ...], bias: bool, dtype: torch.dtype, outputs: int = 64
) -> None:
    torch.manual_seed(0)
    original = nn.Linear(192, outputs, bias=bias).to(dtype)
    nn.init.normal_(original.weight)
    rows = torch.randn(shape, dtype=dtype)
    with torch.inference_mode():
        expected, result = original(rows), LAYERS[kind](original.weight, original.bias)(rows)
    assert (result.dtype, result.shape) == (dtype, expected.shape)
    error = (result.float() - expected.float()).norm()
    assert error <= LARGEST_ERROR[kind] * expected.float().norm()


@pytest.mark.parametrize("kind", BITS)
def test_zeros_stay_zeros(kind: Quantization) -> None:
    layer = LAYERS[kind](torch.zeros(16, 32), None)
    assert not layer(torch.randn(3, 32)).any()
    assert not LAYERS[kind](torch.randn(16, 32), None)(torch.zeros(3, 32)).any()


def test_in_8_bit_a_row_is_the_same_in_any_company() -> None:
    torch.manual_seed(0)
    layer = Int8Linear(torch.randn(256, 512), None)
    rows = torch.randn(40, 512) * torch.logspace(-3, 3, 40)[:, None]
    together = layer(rows)
    for first, count in [(0, 1), (7, 2), (3, 5), (11, 17), (39, 1)]:
        assert torch.equal(layer(rows[first : first + count]), together[first : first + count])


def test_in_8_bit_onednn_has_a_kernel_of_this_processor(capfd: pytest.CaptureFixture[str]) -> None:
    """Not its reference, which is written for nothing but being right: it takes a hundred times as long."""
    layer = Int8Linear(torch.randn(256, 512), None)
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        for count in (1, 5, 40):
            layer(torch.randn(count, 512))
    ctypes.CDLL(None).fflush(None)
    told = capfd.readouterr().out.splitlines()
    kernels = [
        line.partition(",matmul,")[2].partition(",")[0] for line in told if ",exec,cpu,matmul," in line
    ]
    assert len(kernels) == 3
    assert not [kernel for kernel in kernels if kernel.startswith("ref")]


def codes_of(weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    return weight.to(torch.int8), (rows + int8_product.ZERO_UINT8).to(torch.uint8)


@pytest.mark.parametrize("inputs", [32, 33, 3000])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("name", ["halves", "floats"])
def test_sums_for_older_processors_are_exact_at_the_largest_codes(name: str, count: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = 127 - torch.randint(0, 2, (48, inputs), generator=generator) * 254
    rows = 127 - torch.randint(0, 2, (count, inputs), generator=generator) * 254
    weight[0] = 127
    rows[:1] = 127
    codes, given = codes_of(weight, rows)
    sums = KINDS[name](codes, torch.full((48,), 0.5))(given)
    torch.testing.assert_close(sums, (rows.double() @ weight.double().t() / 2).float(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", ["halves", "floats"])
def test_for_older_processors_too_a_row_in_8_bit_is_the_same_in_any_company(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (256, 2500), generator=generator)
    codes, given = codes_of(weight, torch.randint(-127, 128, (40, 2500), generator=generator))
    product = KINDS[name](codes, torch.rand(256, generator=generator))
    together = product(given)
    for first, count in [(0, 1), (7, 2), (3, 5), (11, 17), (39, 1)]:
        assert torch.equal(product(given[first : first + count]), together[first : first + count])


def saturating(codes: Tensor, scales: Tensor) -> Int8Product:
    """Adds two products up in 16 bit, as processors without instructions for 8 bit do."""

    def product(given: Tensor) -> Tensor:
        products = given[:, None, :].long() * codes.long()
        pairs = products.unflatten(-1, (-1, 2)).sum(-1).clamp(-(2**15), 2**15 - 1)
        return (pairs.sum(-1) - int8_product.ZERO_UINT8 * codes.long().sum(1)).float() * scales

    return product


def missing(*_: object) -> Int8Product:
    raise AttributeError("no attribute 'qlinear_prepack'")


@pytest.mark.usefixtures("tried_anew")
def test_product_whose_sums_do_not_fit_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "whole", saturating)
    assert right_kind(64, 192) == "halves"


@pytest.mark.usefixtures("tried_anew")
def test_without_onednn_8_bit_is_as_near_and_the_log_says_once_why_it_is_slower(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(KINDS, "whole", missing)
    monkeypatch.setitem(KINDS, "halves", saturating)
    with caplog.at_level(logging.WARNING):
        for outputs in (64, 32):
            check_a_layer_is_near("int8", (1, 5, 192), False, torch.float32, outputs)
    assert [record.message for record in caplog.records] == [
        "products in 8 bit are computed in floating point, which is slower: oneDNN: "
        "no attribute 'qlinear_prepack'; a product of halves codes is wrong"
    ]


@pytest.mark.usefixtures("tried_anew")
def test_size_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def noted(codes: Tensor, _: Tensor) -> Int8Product:
        tried.append(codes.shape)
        return missing()

    monkeypatch.setitem(KINDS, "whole", noted)
    for outputs in (64, 64, 48, 64):
        right_kind(outputs, 192)
    assert tried == [(64, 192), (48, 192)]


@pytest.mark.usefixtures("tried_anew")
def test_wrong_product_in_4_bit_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Int4Linear.forward
    monkeypatch.setattr(Int4Linear, "forward", lambda layer, rows: right(layer, rows).clamp(max=16.0))
    reason = why_no_int4(torch.float32, 64, 192)
    assert reason == "a product of 64 outputs by 192 inputs in 4 bit is wrong on this processor"


def test_in_4_bit_the_output_projection_and_odd_shapes_get_8(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", intermediate_size=72)
    model = AutoModelForCausalLM.from_pretrained(folder)
    quantize(model, "int4", CPU)
    mlp = model.model.layers[0].mlp
    assert isinstance(model.lm_head, Int8Linear)
    assert isinstance(mlp.down_proj, Int8Linear)  # 72 inputs are no groups of 32
    assert isinstance(mlp.gate_proj.shared.product, Int4Linear)
    assert not any(type(module) is nn.Linear for module in model.modules())


@pytest.mark.parametrize(
    ("kind", "role"), [("int8", "draft"), pytest.param("int4", "target", marks=pytest.mark.slow)]
)
def test_quantized_draft_changes_no_token(kind: Quantization, role: str) -> None:
    """The small draft, and the target's own copy; greedy and seeded."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    encoded = [tuple(tokenizer.encode(prompts(kind, 1)[0]).ids) for kind in ("json", "code", "prose")]
    asked = [
        OfflineRequest(prompt, Sampling(temperature=number % 2, max_tokens=16), number)
        for number, prompt in enumerate(encoded)
    ]
    plain = generate(engine("target"), None, asked, 0)
    drafted = generate(engine("target"), DraftModel(engine(role, kind)), asked, 4)
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]
    rate = sum(output.accepted for output in drafted) / sum(output.drafted for output in drafted)
    assert rate > (0.75 if role == "target" else 0.3)


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_target_in_fp8_drafts_with_its_own_copy_in_fewer_bits(tmp_path: Path, kind: Quantization) -> None:
    folder, _ = in_format(write_checkpoint(tmp_path / "plain", "llama"), "fp8", tmp_path)
    fields = {"model": str(folder), "dtype": "float32", "device": "cpu", "cache_memory": 2**21}
    target = EngineSettings.model_validate(fields)
    draft = EngineSettings.model_validate({**fields, "quantization": kind, "is_draft": True})
    asked = [OfflineRequest((5, 9, 33), Sampling(max_tokens=24, temperature=heat), 1) for heat in (0.0, 0.8)]
    plain = generate(Engine.from_settings(target), None, asked, 0)
    model = load_model(draft)
    assert not any(type(module) in (nn.Linear, StoredLinear) for module in model.modules())
    planned = skeleton(draft).weight_bytes(1, kind, on_cuda=False)
    outputs = sum(module.out_features for module in model.modules() if isinstance(module, Int8Linear))
    # oneDNN keeps a sum of each output, 4 bytes, only on processors that multiply 8 bit (VNNI).
    assert allocated_weights(model) in (planned, planned - 4 * outputs)
    drafted = generate(Engine.from_settings(target), DraftModel(Engine.from_settings(draft)), asked, 3)
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]
    assert sum(output.accepted for output in drafted) > 0


@pytest.mark.usefixtures("tried_anew")
def test_without_the_kernel_4_bit_is_refused_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Int4Linear, "__init__", missing)
    folder = write_checkpoint(tmp_path, "llama")
    with pytest.raises(
        UnsupportedModelError, match=r"quantization='int4': no attribute.*'int8' works on any"
    ):
        Engine.from_settings(EngineSettings(model=str(folder), quantization="int4", cache_memory=2**22))


def test_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "gpt2", tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head = nn.Identity()
    with pytest.raises(UnsupportedModelError, match=r"no nn\.Linear"):
        quantize(model, "int8", CPU)


@pytest.mark.parametrize("outputs", [64, 7])
@pytest.mark.parametrize("kind", BITS)
def test_stored_weight_of_a_gpu_is_near_the_weight_it_was_made_from(kind: Quantization, outputs: int) -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(outputs, 192), torch.randn(5, 192)
    expected = rows @ weight.t()
    found = rows @ stored_weight(weight, kind).widened().t()
    assert (found - expected).norm() <= LARGEST_ERROR[kind] * expected.norm()


@pytest.mark.parametrize("weight", [torch.zeros(4, 32), torch.full((4, 32), 3.0), -torch.ones(4, 32)])
@pytest.mark.parametrize("kind", BITS)
def test_stored_weight_of_equal_numbers_has_these_numbers(kind: Quantization, weight: Tensor) -> None:
    torch.testing.assert_close(stored_weight(weight, kind).widened(), weight)


def test_stored_weight_of_inputs_that_are_no_groups_gets_8_bit() -> None:
    assert stored_weight(torch.randn(4, 72), "int4").kind == "int8"


@needs_compiler
@pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_gpu_quantizes_as_it_loads_and_computes_what_the_weights_stand_for(
    tmp_path: Path, kind: Quantization
) -> None:
    folder = write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    fields = {"model": str(folder), "dtype": "float32", "cache_memory": 2**21, "graphs": False}
    asked = [OfflineRequest((5, 9, 33), Sampling(max_tokens=6), 1)]
    with simulated_cuda():
        made = Engine.from_settings(
            EngineSettings.model_validate({**fields, "device": "cuda", "quantization": kind})
        )
        found = generate(made, None, asked, 0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            bits: Quantization = "int8" if name == "lm_head" else kind
            layer.weight = nn.Parameter(stored_weight(layer.weight.detach(), bits).widened())
    model.save_pretrained(tmp_path / "meant")
    meant = Engine.from_settings(
        EngineSettings(model=str(tmp_path / "meant"), dtype="float32", device="cpu", cache_memory=2**21)
    )
    assert [output.tokens for output in found] == [o.tokens for o in generate(meant, None, asked, 0)]
