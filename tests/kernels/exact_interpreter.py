"""Make Triton's CPU interpreter compute what a GPU computes in bfloat16.

The interpreter keeps bf16 as uint16. It multiplies, compares and dots the bit patterns, and truncates where a GPU (and
torch) rounds fp32 to the nearest even bf16. ``install`` replaces the operations concerned; others are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_BITWISE = {np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift}
_COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}


def widen(bits: np.ndarray) -> np.ndarray:
    """uint16 bit patterns of bf16 as fp32."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow(x: np.ndarray) -> np.ndarray:
    """fp32 as uint16 bit patterns of bf16, rounded to nearest even; every NaN becomes the quiet one."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).astype(np.uint16).reshape(np.shape(x))


def _is_bf16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def _value(handle: Any) -> np.ndarray:
    return widen(handle.data) if _is_bf16(handle) else handle.data


def install() -> None:
    """Replace the interpreter's bf16 operations in this process."""
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    cast, binary, unary, fma, convert = (
        getattr(builder, name) for name in ("cast_impl", "binary_op", "unary_op", "create_fma", "create_fp_to_fp")
    )

    def cast_impl(self: Any, source: Any, target_type: Any) -> Any:
        before, after = source.dtype.scalar, target_type.scalar
        if before == tl.bfloat16 != after:
            wide = widen(source.data)
            return handle(wide if after == tl.float32 else wide.astype(interpreter._get_np_dtype(target_type)), after)
        if after == tl.bfloat16 != before:
            return handle(narrow(source.data.astype(np.float32)), after)
        return cast(self, source, target_type)

    def create_fp_to_fp(self: Any, source: Any, target_type: Any, rounding: Any) -> Any:
        before, after = source.dtype.scalar, target_type.scalar
        nearest = rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if (before, after) == (tl.bfloat16, tl.float32) or ((before, after) == (tl.float32, tl.bfloat16) and nearest):
            return cast_impl(self, source, target_type)
        return convert(self, source, target_type, rounding)

    def binary_op(self: Any, left: Any, right: Any, operation: Callable[..., np.ndarray]) -> Any:
        if not (_is_bf16(left) and _is_bf16(right)) or operation in _BITWISE:
            return binary(self, left, right, operation)
        result = operation(widen(left.data), widen(right.data))
        if operation in _COMPARISONS:
            return handle(result.astype(bool), tl.int1)
        return handle(narrow(result), tl.bfloat16)

    def unary_op(self: Any, x: Any, operation: Callable[..., np.ndarray]) -> Any:
        return handle(narrow(operation(widen(x.data))), tl.bfloat16) if _is_bf16(x) else unary(self, x, operation)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not _is_bf16(z):
            return fma(self, x, y, z)
        return handle(narrow(_value(x) * _value(y) + _value(z)), tl.bfloat16)

    def create_dot(self: Any, x: Any, y: Any, z: Any, precision: Any, imprecise: Any) -> Any:
        # Matrix units multiply 16-bit factors exactly and add in fp32.
        with np.errstate(invalid="ignore"):
            product = np.matmul(_value(x), _value(y), dtype=np.float32) + _value(z)
        return handle(narrow(product) if _is_bf16(z) else product.astype(z.data.dtype), z.dtype.scalar)

    for name, replacement in (
        ("cast_impl", cast_impl),
        ("create_fp_to_fp", create_fp_to_fp),
        ("binary_op", binary_op),
        ("unary_op", unary_op),
        ("create_fma", create_fma),
        ("create_dot", create_dot),
    ):
        setattr(builder, name, replacement)
