"""Triton's interpreter without what it repeats, and with products whose rows are independent.

Types, shapes and checks take nearly all the time of a small block, and are the same at each launch. Without
them a launch takes a quarter of the time.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton import knobs
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

Shape = tuple[int, ...]

ALIKE = {"int1", "int32", "int64", "fp32"}
"""Types of which two make the same type, divided too."""


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Owner of a name, the name, and its replacement; nothing if kernels are compiled.

    The compiler shares some of these names, and a number of one kernel's code must not stand in another's.
    """
    if not knobs.runtime.interpret:
        return
    yield InterpretedFunction, "__call__", patching_once(InterpretedFunction.__call__)
    yield interpreter, "_get_np_dtype", looked_up_once(interpreter._get_np_dtype)
    yield core, "_unwrap_if_constexpr", at_first_glance(core._unwrap_if_constexpr)
    yield core.dtype, "__eq__", by_identity_first(core.dtype.__eq__)
    yield core.block_type, "__init__", of_known_shapes(core.block_type.__init__)
    yield core.tensor, "__init__", tensor_of_known_shapes()
    yield interpreter, "_patch_attr", calling_at_once()
    yield (
        TritonSemantic,
        "binary_op_type_checking_impl",
        unless_alike(TritonSemantic.binary_op_type_checking_impl),
    )
    yield TritonSemantic, "binary_op_sanitize_overflow_impl", unless_asserted(TritonSemantic)
    yield TritonSemantic, "computation_type_impl", decided_once(TritonSemantic.computation_type_impl)
    yield TritonSemantic, "scalar_constant", made_once(TritonSemantic.scalar_constant)
    yield TritonSemantic, "broadcast_impl_value", unless_equal(TritonSemantic.broadcast_impl_value)
    yield InterpreterBuilder, "create_dot", added_by_halves(InterpreterBuilder.create_dot)


def patching_once(call: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function of a kernel as Triton does, in a quarter of the time.

    Triton replaces the operations of its language by others that compute, when it launches a kernel and again
    at each such call. Finding them takes most of the time, and nothing is left to be replaced.

    call: InterpretedFunction.__call__
    """

    def call_function(function: Any, *args: Any, **kwargs: Any) -> Any:
        if any(tl.core.is_builtin(language.arange) for language in _languages(function.fn)):
            return call(function, *args, **kwargs)
        return function.rewrite()(*args, **kwargs)

    return call_function


@cache
def _languages(function: Callable[..., Any]) -> tuple[ModuleType, ...]:
    """The modules of the language that it sees."""
    seen = [module for module in function.__globals__.values() if inspect.ismodule(module)]
    return tuple(module for module in seen if module in (tl, tl.core))


def looked_up_once(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Table of NumPy's types: Triton makes it anew for each look.

    look_up: _get_np_dtype
    """
    known: dict[str, Any] = {}
    pointer = np.dtype(np.uint64)

    def dtype_of(kind: Any) -> Any:
        scalar = kind.scalar
        if isinstance(scalar, core.pointer_type):
            return pointer
        if scalar.name not in known:
            known[scalar.name] = look_up(scalar)
        return known[scalar.name]

    return dtype_of


def at_first_glance(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Unwraps what nearly always is a number, a type or a tensor.

    unwrap: _unwrap_if_constexpr
    """
    plain = {int, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    return unwrapped


def by_identity_first(equals: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """equals: of types of elements, which are mostly the same objects"""
    return lambda one, other: one is other or equals(one, other)


def of_known_shapes(initialize: Callable[..., None]) -> Callable[..., None]:
    """Table of types of blocks.

    initialize: block_type.__init__
    """
    known: dict[Shape, tuple[Any, int, str]] = {}

    def initialize_quickly(block: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([core._unwrap_if_constexpr(size) for size in shape])
        if sizes not in known:
            initialize(block, element_ty, list(sizes))  # refuses what is none
            known[sizes] = block.shape, block.numel, str(block.shape)
        block.shape, block.numel, told = known[sizes]
        block.element_ty = element_ty
        block.name = f"<{told}, {element_ty}>"

    return initialize_quickly


def tensor_of_known_shapes() -> Callable[..., None]:
    """Replaces tensor.__init__."""
    known: dict[Shape, tuple[Any, Any]] = {}
    of_scalars = core.tuple([]), core.constexpr(1)

    def initialize(tensor: Any, handle: Any, kind: Any) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        if not kind.is_block():
            tensor.shape, tensor.numel = of_scalars
            return
        sizes = tuple(kind.shape.values)
        if sizes not in known:
            known[sizes] = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(kind.numel)
        tensor.shape, tensor.numel = known[sizes]

    return initialize


def calling_at_once() -> Callable[..., None]:
    """Replaces _patch_attr, so that an operation is called by one function and not by three."""

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        operation = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return operation(*args, **kwargs)

        scope.set_attr(owner, name, call)

    return patch


def unless_alike(check: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves two tensors of one shape and one type as they are, if that is the type of the result too.

    check: TritonSemantic.binary_op_type_checking_impl
    """

    def check_two(semantic: Any, one: Any, other: Any, *allowed: Any, **options: Any) -> Any:
        if (
            type(one) is type(other) is core.tensor
            and one.dtype is other.dtype
            and one.shape is other.shape
            and (one.dtype.name in ALIKE)
        ):
            return one, other
        return check(semantic, one, other, *allowed, **options)

    return check_two


def unless_asserted(semantic: type[TritonSemantic]) -> Callable[..., None]:
    """Computes whether whole numbers overflow only if that is asserted, which is in debugging alone.

    Triton computes each sum, difference and product once more with 64 bits, and then asserts nothing: half of
    the time of a kernel.
    """
    check = semantic.binary_op_sanitize_overflow_impl

    def check_if_asserted(semantic: Any, one: Any, other: Any, operation: Any) -> None:
        if semantic.builder.options.debug:
            check(semantic, one, other, operation)

    return check_if_asserted


def decided_once(decide: Callable[..., Any]) -> Callable[..., Any]:
    """Table of the types in which two types are computed.

    decide: TritonSemantic.computation_type_impl
    """
    known: dict[tuple[str, bool, str, bool, bool], Any] = {}

    def computation_type(
        semantic: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, divides: bool
    ) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, divides
        if key not in known:
            known[key] = decide(semantic, a, a_is_scalar, b, b_is_scalar, divides)
        return known[key]

    return computation_type


def made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Table of whole numbers, which no operation changes in place.

    make: TritonSemantic.scalar_constant
    """
    known: dict[tuple[int, str], Any] = {}

    def scalar_constant(semantic: Any, value: Any, dtype: Any) -> Any:
        if type(value) is not int:
            return make(semantic, value, dtype)
        key = value, dtype.name
        if key not in known:
            known[key] = make(semantic, value, dtype)
        return known[key]

    return scalar_constant


def unless_equal(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Tensors of one shape, which share it, are left as they are.

    broadcast: TritonSemantic.broadcast_impl_value
    """

    def broadcast_two(semantic: Any, one: Any, other: Any) -> Any:
        return (one, other) if one.shape is other.shape else broadcast(semantic, one, other)

    return broadcast_two


def added_by_halves(dot: Callable[..., Any]) -> Callable[..., Any]:
    """Computes each number of a product of matrices by one order of additions, whatever row it stands in.

    Triton's interpreter leaves products to NumPy, and NumPy to a library. In what order that adds up depends
    on the processor, and on some processors on a row's place among the others. On a GPU every row of a tile
    is added up alike. Here products of numbers are added by halves, element by element, which no place and
    no processor changes.

    dot: InterpreterBuilder.create_dot
    """

    def create_dot(builder: Any, left: Any, right: Any, added: Any, *options: Any) -> Any:
        kind = added.data.dtype
        if kind != np.float32 or not {left.data.dtype, right.data.dtype} <= {np.dtype("f2"), kind}:
            return dot(builder, left, right, added, *options)
        a, b = left.data.astype(kind, copy=False), right.data.astype(kind, copy=False)
        products = a[..., :, None] * b[..., None, :, :]
        while (count := products.shape[-2]) > 1:  # a power of two, as all sizes in Triton
            products = products[..., : count // 2, :] + products[..., count // 2 :, :]
        return TensorHandle(products[..., 0, :] + added.data, added.dtype.scalar)

    return create_dot
