"""Packed linear layers compute what nn.Linear computes, from one copy of the weight."""

import gc
import logging
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine.forward import linear
from outrider.engine.forward.linear import PackedLinear, Projection, SharedProduct, optimize_for_cpu
from outrider.engine.kernels.cpu import functions

ROWS = [1, 2, 3, 4, 5, 8, 9, 16, 33]

needs_packing = pytest.mark.skipif(
    not linear.packing_works(torch.float32), reason="this build of torch cannot pack weights"
)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def nn_linear(in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=bias).to(dtype)


def packed(layer: nn.Linear) -> PackedLinear:
    return PackedLinear(layer.weight, layer.bias)


def tiny_llama(dtype: torch.dtype, tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def logits(model: LlamaForCausalLM, tokens: int) -> Tensor:
    return model(torch.arange(tokens)[None] % 128, use_cache=False).logits


@needs_packing
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("out_features", [256, 144, 100], ids=lambda n: f"{n} wide")
def test_float32_is_within_rounding(rows: int, bias: bool, out_features: int) -> None:
    layer = nn_linear(192, out_features, bias, torch.float32)
    inputs = torch.randn(1, rows, 192)
    torch.testing.assert_close(packed(layer)(inputs), layer(inputs), atol=2e-6, rtol=0)


@needs_packing
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_bfloat16_is_the_same_bit_for_bit(rows: int, bias: bool) -> None:
    layer = nn_linear(192, 256, bias, torch.bfloat16)
    inputs = torch.randn(1, rows, 192, dtype=torch.bfloat16)
    assert torch.equal(packed(layer)(inputs), layer(inputs))


@needs_packing
def test_a_row_hardly_depends_on_the_rows_beside_it() -> None:
    layer = packed(nn_linear(1024, 256, False, torch.float32))
    inputs = torch.randn(32, 1024)
    together = layer(inputs)
    for rows in ROWS[:-1]:
        torch.testing.assert_close(layer(inputs[:rows]), together[:rows], atol=2e-6, rtol=0)


@needs_packing
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_what_is_added_to_a_product_is_added(rows: int, bias: bool) -> None:
    layer = nn_linear(192, 256, bias, torch.float32)
    inputs, added = torch.randn(rows, 192), torch.randn(rows, 256)
    torch.testing.assert_close(packed(layer)(inputs, added), layer(inputs) + added, atol=1e-5, rtol=0)


@needs_packing
@pytest.mark.parametrize("shape", [(192,), (1, 192), (1, 1, 192), (2, 3, 192), (0, 192)])
def test_every_shape_of_rows(shape: tuple[int, ...]) -> None:
    layer = nn_linear(192, 256, True, torch.float32)
    inputs = torch.randn(shape)
    torch.testing.assert_close(packed(layer)(inputs), layer(inputs), atol=2e-6, rtol=0)


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adds", [False, True])
def test_a_row_is_the_same_alone_and_beside_others(dtype: torch.dtype, adds: bool) -> None:
    layer = packed(nn_linear(2816, 256, False, dtype))
    rows, added = torch.randn(64, 2816, dtype=dtype), torch.randn(64, 256, dtype=dtype)
    together = layer(rows, added if adds else None)
    for count in (1, 2, 3, 5, 8, 13, 40):
        assert torch.equal(layer(rows[:count], added[:count] if adds else None), together[:count])


@needs_packing
def test_a_row_is_the_same_with_any_number_of_threads() -> None:
    layer, rows = packed(nn_linear(512, 1000, False, torch.float32)), torch.randn(5, 512)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(layer(rows))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_packing
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_projections_of_one_input_share_one_product(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [nn_linear(192, width, True, torch.float32) for width in (128, 64, 64)]
    shared = SharedProduct(layers)
    products = 0
    compute = PackedLinear.forward

    def counted(self: PackedLinear, rows: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return compute(self, rows)

    monkeypatch.setattr(PackedLinear, "forward", counted)
    for number in (1, 2):
        inputs = torch.randn(1, 5, 192)
        for index in order:
            result = Projection(shared, index)(inputs)
            torch.testing.assert_close(result, layers[index](inputs), atol=2e-6, rtol=0)
        assert products == number


@needs_packing
def test_projections_of_different_inputs_do_not_mix() -> None:
    layers = [nn_linear(192, 64, False, torch.float32) for _ in range(2)]
    shared = SharedProduct(layers)
    first, second = (Projection(shared, index) for index in range(2))
    one, other = torch.randn(1, 5, 192), torch.randn(1, 5, 192)
    for projection, layer, inputs in [
        (first, layers[0], one),
        (second, layers[1], other),
        (second, layers[1], one),
        (first, layers[0], other),
        (first, layers[0], other),
    ]:
        torch.testing.assert_close(projection(inputs), layer(inputs), atol=2e-6, rtol=0)


@needs_packing
def test_nothing_is_kept_once_every_projection_was_taken() -> None:
    shared = SharedProduct([nn_linear(192, 64, False, torch.float32) for _ in range(2)])
    inputs = torch.randn(1, 5, 192)
    shared.part(0, inputs)
    shared.part(1, inputs)
    assert shared.input is None
    assert not shared.parts


@needs_packing
@pytest.mark.parametrize("tokens", [1, 2, 5, 33])
def test_a_model_computes_the_same_in_float32(tokens: int) -> None:
    model = tiny_llama(torch.float32)
    before = logits(model, tokens)
    optimize_for_cpu(model)
    torch.testing.assert_close(logits(model, tokens), before, atol=1e-5, rtol=0)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert isinstance(model.model.layers[0].self_attn.q_proj, Projection)
    assert isinstance(model.model.layers[0].mlp.up_proj, Projection)


@needs_packing
@pytest.mark.parametrize("tokens", [1, 2, 5, 33])
def test_a_model_computes_the_same_bits_in_bfloat16(tokens: int) -> None:
    model = tiny_llama(torch.bfloat16)
    before = logits(model, tokens)
    optimize_for_cpu(model)
    assert torch.equal(logits(model, tokens), before)
    assert not any(type(module) is nn.Linear for module in model.modules())


def test_layers_that_would_be_slower_packed_are_only_joined() -> None:
    model = tiny_llama(torch.float16)
    before = logits(model, 5)
    optimize_for_cpu(model)
    torch.testing.assert_close(logits(model, 5), before, atol=1e-2, rtol=0)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    layer = model.model.layers[0]
    assert layer.self_attn.q_proj.shared is layer.self_attn.v_proj.shared
    assert layer.mlp.gate_proj.shared is layer.mlp.up_proj.shared
    assert type(layer.mlp.down_proj) is nn.Linear


@needs_packing
def test_the_unpacked_weights_are_freed() -> None:
    model = tiny_llama(torch.float32)
    weights = [weakref.ref(module.weight) for module in model.modules() if type(module) is nn.Linear]
    optimize_for_cpu(model)
    gc.collect()
    assert weights
    assert not any(weight() is not None for weight in weights)


@needs_packing
def test_a_tied_embedding_stays_for_the_input() -> None:
    model = tiny_llama(torch.float32, tied=True)
    before = logits(model, 5)
    optimize_for_cpu(model)
    assert isinstance(model.lm_head, PackedLinear)
    torch.testing.assert_close(logits(model, 5), before, atol=1e-5, rtol=0)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_without_onednn_layers_stay_and_the_log_says_so_once(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: object) -> None:
        raise error

    monkeypatch.setattr(PackedLinear, "__init__", missing)
    model = tiny_llama(torch.bfloat16)
    before = logits(model, 5)
    with caplog.at_level(logging.WARNING):
        optimize_for_cpu(model)
    assert torch.equal(logits(model, 5), before)
    assert [record.message for record in caplog.records] == [
        "linear layers stay as they are, which is slower: this build of torch has no oneDNN, or another one"
    ]


def test_without_a_compiler_layers_stay_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(functions, "compiled", lambda: None)
    model = tiny_llama(torch.float32)
    before = logits(model, 5)
    with caplog.at_level(logging.WARNING):
        optimize_for_cpu(model)
    torch.testing.assert_close(logits(model, 5), before, atol=1e-5, rtol=0)
    (record,) = caplog.records
    assert "without a C++ compiler" in record.message
