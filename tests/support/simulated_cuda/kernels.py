"""Library kernels with conditions of their own, and Triton's, which run in Triton's interpreter."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention import varlen

from tests.support.simulated_cuda.device import SimulatedCuda, aten
from tests.support.simulated_cuda.tensor import SimulatedTensor, numbers_of

LONGEST_HEAD = 256


@dataclass(frozen=True)
class FlashBackend:
    """What a version of FlashAttention refuses, in the words of its C++ (flash_api.cpp, attention.cu)."""

    name: str
    page_multiple: int  # of tokens
    wants_key_starts: bool  # always, or else never with pages

    def check(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_starts: torch.Tensor | None,
        key_starts: torch.Tensor | None,
        seqused: torch.Tensor | None,
        block_table: torch.Tensor | None,
        num_splits: int | None,
    ) -> None:
        """Raises RuntimeError."""
        if self.wants_key_starts:
            _require(
                (query_starts is None) == (key_starts is None),
                "cumulative_sequence_length_q and cumulative_sequence_length_k must be both set or both not "
                "set",
            )
        elif block_table is not None:
            _require(key_starts is None, "If cu_seqlens_k is passed in, then page table is not supported")
        halves = (torch.float16, torch.bfloat16)
        _require(query.dtype in halves, "FlashAttention only support fp16 and bf16 data type")
        _require(query.dtype == key.dtype == value.dtype, "query, key and value must have the same dtype")
        for one in (query, key, value):
            _require(one.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        counts = {"cu_seqlens_q": query_starts, "cu_seqlens_k": key_starts, "seqused_k": seqused}
        for name, count in counts.items():
            _require(count is None or count.dtype == torch.int32, f"{name} must have dtype int32")
            _require(count is None or count.is_contiguous(), f"{name} must be contiguous")
        heads, head_size = query.shape[-2:]
        _require(head_size % 8 == 0, "head_size should be a multiple of 8")
        _require(head_size <= LONGEST_HEAD, "FlashAttention forward only supports head dimension at most 256")
        _require(
            heads % key.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query"
        )
        if block_table is None:
            return
        _require(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
        _require(block_table.stride(-1) == 1, "block_table must have contiguous last dimension")
        _require(
            key.shape[1] % self.page_multiple == 0,
            f"Paged KV cache block size must be divisible by {self.page_multiple}",
        )
        # It does not refuse to split, but what comes out is wrong: pytorch#194167.
        _require(
            not self.wants_key_starts or num_splits == 1,
            "FA2 splits pages wrongly: num_splits must be 1",
        )


FA2 = FlashBackend("FA2", page_multiple=256, wants_key_starts=True)
FA3 = FlashBackend("FA3", page_multiple=1, wants_key_starts=False)


def add_kernels(cuda: SimulatedCuda, flash: FlashBackend) -> None:
    """flash: which FlashAttention the device has."""
    cuda.rules[torch.ops.torch_attn._varlen_attn.default] = _varlen_attn
    cuda.rules[aten._flash_attention_forward.default] = lambda device, func, args, kwargs: _flash(
        device, flash, *args, **kwargs
    )


def _varlen_attn(cuda: SimulatedCuda, func: Any, args: Any, kwargs: Any) -> Any:
    """torch's own Python, as it runs on a GPU: it ends in the operation below."""
    with cuda:
        return varlen._varlen_attn._init_fn(*args, **kwargs)


def _flash(
    cuda: SimulatedCuda,
    flash: FlashBackend,
    query: SimulatedTensor,  # [num_tokens, heads, dim]
    key: SimulatedTensor,  # [pages, tokens of a page, kv_heads, dim], or [num_tokens, kv_heads, dim]
    value: SimulatedTensor,
    query_starts: SimulatedTensor,
    key_starts: SimulatedTensor | None,
    most_queries: int,
    most_keys: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: SimulatedTensor | None = None,
    alibi_slopes: SimulatedTensor | None = None,
    block_table: SimulatedTensor | None = None,
    num_splits: int | None = None,
) -> Any:
    flash.check(query, key, value, query_starts, key_starts, seqused_k, block_table, num_splits)
    tensors = (query, key, value, query_starts, key_starts, seqused_k, block_table)
    cuda.check_devices(aten._flash_attention_forward.default, tensors, {})
    left = -1 if window_size_left is None else window_size_left
    right = 0 if is_causal else -1 if window_size_right is None else window_size_right
    output = torch.full_like(query.numbers, math.nan)  # rows that nobody owns are left as they are
    numbers = [numbers_of(one) for one in tensors]

    def attend() -> None:
        _attend(output, numbers, most_queries, scale, left, right)

    launch(cuda, "flash_attention", attend)
    heads, rows = query.shape[1], query.shape[0]
    nothing = torch.zeros(2, dtype=torch.uint64)
    results = (output, torch.zeros(heads, rows), nothing, nothing.clone(), nothing.clone())
    return tuple(SimulatedTensor(result, query.device) for result in results)


def _attend(
    output: torch.Tensor,
    numbers: list[Any],  # the tensors that the kernel is given, in its order
    most_queries: int,
    scale: float | None,
    left: int,
    right: int,
) -> None:
    """Plain arithmetic; masks are aligned at the last query and the last key."""
    query, key, value, query_starts, key_starts, seqused, block_table = numbers
    for span, (start, end) in enumerate(pairwise(query_starts.tolist())):
        assert end - start <= most_queries, "beyond max_q the kernel computes nothing"
        if block_table is not None:
            keys, values = (stored[block_table[span].long()].flatten(0, 1) for stored in (key, value))
        else:
            assert key_starts is not None
            own = slice(*key_starts[span : span + 2].tolist())
            keys, values = key[own], value[own]
        length = len(keys) if seqused is None else int(seqused[span])
        repeats = query.shape[1] // keys.shape[1]
        keys, values = (stored[:length].repeat_interleave(repeats, 1).float() for stored in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys)
        scores *= query.shape[2] ** -0.5 if scale is None else scale
        positions = torch.arange(length - (end - start), length)[:, None]
        slots = torch.arange(length)
        hidden = torch.zeros(end - start, length, dtype=torch.bool)
        if right >= 0:
            hidden |= slots > positions + right
        if left >= 0:
            hidden |= slots < positions - left
        probs = scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0)
        output[start:end] = torch.einsum("hqk,khd->qhd", probs, values).to(output.dtype)


def launch(cuda: SimulatedCuda, name: str, kernel: Callable[[], None]) -> None:
    """One kernel, which writes its results to memory that it was given."""
    cuda.launched(name)
    if cuda.capturing is not None:
        cuda.capturing.record(kernel)
    kernel()


def interpreted(cuda: SimulatedCuda, run: Callable[..., None]) -> Callable[..., None]:
    """Of Triton's interpreter: a launch of a kernel, with simulated tensors or with others.

    run: GridExecutor.__call__
    """

    def launch_kernel(executor: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        ours = [one for one in tensors if isinstance(one, SimulatedTensor)]
        if not ours:
            run(executor, *args, **kwargs)
            return
        if len(ours) < len(tensors):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        if any(one.device != cuda.current for one in ours):
            raise torch.AcceleratorError(
                f"CUDA error: an illegal memory access was encountered (the current device is {cuda.current})"
            )
        arguments = [numbers_of(one) for one in args]
        options = {name: numbers_of(one) for name, one in kwargs.items()}
        launch(cuda, executor.fn.__name__, lambda: run(executor, *arguments, **options))

    return launch_kernel


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)
