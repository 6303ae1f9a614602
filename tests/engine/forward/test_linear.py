"""Packed linear layers compute what nn.Linear computes, from one copy of the weight."""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.engine.forward.linear import (
    OneDnnProduct,
    PackedLinear,
    Projection,
    SharedProduct,
    optimize_for_cpu,
    why_unpacked,
)
from outrider.engine.kernels.cpu import functions

ROWS = [1, 2, 3, 4, 5, 8, 9, 16, 33]


def needs_packing(dtype: torch.dtype) -> pytest.MarkDecorator:
    reason = why_unpacked(dtype, 256, 192)
    return pytest.mark.skipif(reason is not None, reason=f"{dtype} is not packed here: {reason}")


needs_packed_float32, needs_packed_bfloat16 = needs_packing(torch.float32), needs_packing(torch.bfloat16)
TYPES = [
    pytest.param(torch.float32, marks=needs_packed_float32),
    pytest.param(torch.bfloat16, marks=needs_packed_bfloat16),
]


@pytest.fixture
def tried_anew() -> Iterator[None]:
    """What the processor can do is tried again, during the test and after it."""
    for cached in (why_unpacked, functions.found):
        cached.cache_clear()
    yield
    for cached in (why_unpacked, functions.found):
        cached.cache_clear()


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


@needs_packed_float32
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("out_features", [256, 144, 100], ids=lambda n: f"{n} wide")
def test_float32_is_within_rounding(rows: int, bias: bool, out_features: int) -> None:
    layer = nn_linear(192, out_features, bias, torch.float32)
    inputs = torch.randn(1, rows, 192)
    torch.testing.assert_close(packed(layer)(inputs), layer(inputs), atol=2e-6, rtol=0)


@needs_packed_bfloat16
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_bfloat16_is_the_same_bit_for_bit(rows: int, bias: bool) -> None:
    layer = nn_linear(192, 256, bias, torch.bfloat16)
    inputs = torch.randn(1, rows, 192, dtype=torch.bfloat16)
    assert torch.equal(packed(layer)(inputs), layer(inputs))


@needs_packed_float32
def test_row_hardly_depends_on_the_rows_beside_it() -> None:
    layer = packed(nn_linear(1024, 256, False, torch.float32))
    inputs = torch.randn(32, 1024)
    together = layer(inputs)
    for rows in ROWS[:-1]:
        torch.testing.assert_close(layer(inputs[:rows]), together[:rows], atol=2e-6, rtol=0)


@needs_packed_float32
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_rows_added_to_a_product_are_added(rows: int, bias: bool) -> None:
    layer = nn_linear(192, 256, bias, torch.float32)
    inputs, added = torch.randn(rows, 192), torch.randn(rows, 256)
    torch.testing.assert_close(packed(layer)(inputs, added), layer(inputs) + added, atol=1e-5, rtol=0)


@needs_packed_float32
@pytest.mark.parametrize("shape", [(192,), (1, 192), (1, 1, 192), (2, 3, 192), (0, 192)])
def test_every_shape_of_rows(shape: tuple[int, ...]) -> None:
    layer = nn_linear(192, 256, True, torch.float32)
    inputs = torch.randn(shape)
    torch.testing.assert_close(packed(layer)(inputs), layer(inputs), atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("adds", [False, True])
def test_row_is_the_same_alone_and_beside_others(dtype: torch.dtype, adds: bool) -> None:
    layer = packed(nn_linear(2816, 256, False, dtype))
    rows, added = torch.randn(64, 2816, dtype=dtype), torch.randn(64, 256, dtype=dtype)
    together = layer(rows, added if adds else None)
    for count in (1, 2, 3, 5, 8, 13, 40):
        assert torch.equal(layer(rows[:count], added[:count] if adds else None), together[:count])


@needs_packed_float32
def test_row_is_the_same_with_any_number_of_threads() -> None:
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


@needs_packed_float32
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


@needs_packed_float32
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


@needs_packed_float32
def test_nothing_is_kept_once_every_projection_was_taken() -> None:
    shared = SharedProduct([nn_linear(192, 64, False, torch.float32) for _ in range(2)])
    inputs = torch.randn(1, 5, 192)
    shared.part(0, inputs)
    shared.part(1, inputs)
    assert shared.input is None
    assert not shared.parts


@needs_packed_float32
@pytest.mark.parametrize("tokens", [1, 2, 5, 33])
def test_model_computes_the_same_in_float32(tokens: int) -> None:
    model = tiny_llama(torch.float32)
    before = logits(model, tokens)
    optimize_for_cpu(model)
    torch.testing.assert_close(logits(model, tokens), before, atol=1e-5, rtol=0)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert isinstance(model.model.layers[0].self_attn.q_proj, Projection)
    assert isinstance(model.model.layers[0].mlp.up_proj, Projection)


@pytest.mark.parametrize("tokens", [1, 2, 5, 33])
def test_model_computes_the_same_bits_in_bfloat16(tokens: int) -> None:
    model = tiny_llama(torch.bfloat16)
    before = logits(model, tokens)
    optimize_for_cpu(model)
    assert torch.equal(logits(model, tokens), before)
    is_packed = why_unpacked(torch.bfloat16, 128, 64) is None
    assert isinstance(model.lm_head, PackedLinear) == is_packed


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


@needs_packed_float32
def test_unpacked_weights_are_freed() -> None:
    model = tiny_llama(torch.float32)
    weights = [weakref.ref(module.weight) for module in model.modules() if type(module) is nn.Linear]
    optimize_for_cpu(model)
    gc.collect()
    assert weights
    assert not any(weight() is not None for weight in weights)


@needs_packed_float32
def test_tied_embedding_stays_for_the_input() -> None:
    model = tiny_llama(torch.float32, tied=True)
    before = logits(model, 5)
    optimize_for_cpu(model)
    assert isinstance(model.lm_head, PackedLinear)
    torch.testing.assert_close(logits(model, 5), before, atol=1e-5, rtol=0)


def refused(message: str) -> Callable[..., None]:
    def refuse(*_: object) -> None:
        raise RuntimeError(message)

    return refuse


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("no attribute '_linear_pointwise'"),
        RuntimeError("bf16 path needs the cpu support avx512bw"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.usefixtures("tried_anew")
def test_layers_that_onednn_does_not_pack_stay_and_the_log_says_its_reason_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(OneDnnProduct, "__init__", refuse)
    model = tiny_llama(torch.bfloat16)
    before = logits(model, 5)
    with caplog.at_level(logging.WARNING):
        optimize_for_cpu(model)
    assert torch.equal(logits(model, 5), before)
    assert [record.message for record in caplog.records] == [
        f"linear layers stay as they are, which is slower: torch.bfloat16: {error}"
    ]


@needs_packed_bfloat16
@pytest.mark.usefixtures("tried_anew")
def test_layer_of_a_size_that_is_multiplied_wrongly_stays_and_other_sizes_are_packed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = OneDnnProduct.__call__

    def wrong_at_96_inputs(self: OneDnnProduct, rows: Tensor, added: Tensor | None = None) -> Tensor:
        return right(self, rows, added) * (2 if rows.shape[1] == 96 else 1)

    monkeypatch.setattr(OneDnnProduct, "__call__", wrong_at_96_inputs)
    model = tiny_llama(torch.bfloat16)
    before = logits(model, 5)
    with caplog.at_level(logging.WARNING):
        optimize_for_cpu(model)
    assert torch.equal(logits(model, 5), before)
    mlp = model.model.layers[0].mlp
    assert type(mlp.down_proj) is nn.Linear
    assert isinstance(mlp.gate_proj.shared.product, PackedLinear)
    assert [record.message for record in caplog.records] == [
        "linear layers stay as they are, which is slower: torch.bfloat16: "
        "a packed product of 64 outputs by 96 inputs is wrong on this processor"
    ]


@pytest.mark.usefixtures("tried_anew")
def test_size_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(OneDnnProduct, "__init__", lambda _, weight, bias: tried.append(weight.shape))
    monkeypatch.setattr(OneDnnProduct, "__call__", refused("cannot"))
    for outputs in (48, 48, 64, 48):
        assert why_unpacked(torch.bfloat16, outputs, 32) == "cannot"
    assert tried == [(48, 32), (64, 32)]


@pytest.mark.usefixtures("tried_anew")
@pytest.mark.parametrize(
    ("capability", "compiled_for", "reason"),
    [
        ("AVX2", {"AVX2": "none"}, "is missing; an installation compiles it if there is a C++ compiler"),
        ("DEFAULT", {"AVX2": "avx2"}, "need a processor with AVX2, and torch says DEFAULT of this one"),
    ],
    ids=["no compiler", "no AVX2"],
)
def test_without_compiled_functions_layers_stay_and_the_log_says_what_is_missing_once(
    capability: str,
    compiled_for: dict[str, str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(functions, "INSTRUCTION_SETS", compiled_for)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    model = tiny_llama(torch.float32)
    before = logits(model, 5)
    with caplog.at_level(logging.WARNING):
        optimize_for_cpu(model)
    torch.testing.assert_close(logits(model, 5), before, atol=1e-5, rtol=0)
    (record,) = caplog.records
    assert reason in record.message
