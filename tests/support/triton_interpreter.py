"""Makes Triton's interpreter faster, and its matrix products independent of a row's position.

Types, shapes and checks take nearly all the time of a small block, and are equal at each launch. Without
recomputing them, a launch takes a quarter of the time.
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
    """Yields owner, name and replacement of each patched attribute; nothing if kernels are compiled.

    The compiler also uses some of these functions, and must not share cached constants between kernels.
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

    Triton patches the operations of its language when it launches a kernel, and again at each such call. The
    second search takes most of the time and finds nothing to patch.

    call: InterpretedFunction.__call__.
    """

    def call_function(function: Any, *args: Any, **kwargs: Any) -> Any:
        if any(tl.core.is_builtin(language.arange) for language in _languages(function.fn)):
            return call(function, *args, **kwargs)
        return function.rewrite()(*args, **kwargs)

    return call_function


@cache
def _languages(function: Callable[..., Any]) -> tuple[ModuleType, ...]:
    """Returns the modules of Triton's language among a function's globals."""
    seen = [module for module in function.__globals__.values() if inspect.ismodule(module)]
    return tuple(module for module in seen if module in (tl, tl.core))


def looked_up_once(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Caches NumPy dtypes: Triton rebuilds the table at each lookup.

    look_up: _get_np_dtype.
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
    """Adds a fast path for values that need no unwrapping: numbers, types and tensors.

    unwrap: _unwrap_if_constexpr.
    """
    plain = {int, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    return unwrapped


def by_identity_first(equals: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Compares element types by identity first. equals: dtype.__eq__."""
    return lambda one, other: one is other or equals(one, other)


def of_known_shapes(initialize: Callable[..., None]) -> Callable[..., None]:
    """Caches the shapes of block types.

    initialize: block_type.__init__.
    """
    known: dict[Shape, tuple[Any, int, str]] = {}

    def initialize_quickly(block: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([core._unwrap_if_constexpr(size) for size in shape])
        if sizes not in known:
            initialize(block, element_ty, list(sizes))  # raises for invalid shapes
            known[sizes] = block.shape, block.numel, str(block.shape)
        block.shape, block.numel, told = known[sizes]
        block.element_ty = element_ty
        block.name = f"<{told}, {element_ty}>"

    return initialize_quickly


def tensor_of_known_shapes() -> Callable[..., None]:
    """Replaces tensor.__init__ with a version that caches shapes."""
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
    """Replaces _patch_attr, so that an operation is called through one function instead of three."""

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        operation = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return operation(*args, **kwargs)

        scope.set_attr(owner, name, call)

    return patch


def unless_alike(check: Callable[..., Any]) -> Callable[..., Any]:
    """Skips type checking for two tensors of equal shape and type, if the result has that type too.

    check: TritonSemantic.binary_op_type_checking_impl.
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
    """Checks integer overflow only in debug mode, in which Triton asserts it.

    Otherwise Triton computes each sum, difference and product again in 64 bits without asserting anything,
    which takes half of the time of a kernel.
    """
    check = semantic.binary_op_sanitize_overflow_impl

    def check_if_asserted(semantic: Any, one: Any, other: Any, operation: Any) -> None:
        if semantic.builder.options.debug:
            check(semantic, one, other, operation)

    return check_if_asserted


def decided_once(decide: Callable[..., Any]) -> Callable[..., Any]:
    """Caches the result type of two operand types.

    decide: TritonSemantic.computation_type_impl.
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
    """Caches integer constants, which no operation changes in place.

    make: TritonSemantic.scalar_constant.
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
    """Skips broadcasting for tensors that share one shape object.

    broadcast: TritonSemantic.broadcast_impl_value.
    """

    def broadcast_two(semantic: Any, one: Any, other: Any) -> Any:
        return (one, other) if one.shape is other.shape else broadcast(semantic, one, other)

    return broadcast_two


def added_by_halves(dot: Callable[..., Any]) -> Callable[..., Any]:
    """Computes matrix products with a fixed order of additions, whatever a row's position.

    Triton's interpreter uses NumPy, which uses a BLAS library. There, the order of additions depends on the
    processor, and on some processors also on the position of a row. On a GPU, all rows of a tile have the
    same order. Here, products are added pairwise by halves, which is independent of position and processor.

    dot: InterpreterBuilder.create_dot.
    """

    def create_dot(builder: Any, left: Any, right: Any, added: Any, *options: Any) -> Any:
        kind = added.data.dtype
        if kind != np.float32 or not {left.data.dtype, right.data.dtype} <= {np.dtype("f2"), kind}:
            return dot(builder, left, right, added, *options)
        a, b = left.data.astype(kind, copy=False), right.data.astype(kind, copy=False)
        products = a[..., :, None] * b[..., None, :, :]
        while (count := products.shape[-2]) > 1:  # a power of two, like all sizes in Triton
            products = products[..., : count // 2, :] + products[..., count // 2 :, :]
        return TensorHandle(products[..., 0, :] + added.data, added.dtype.scalar)

    return create_dot
