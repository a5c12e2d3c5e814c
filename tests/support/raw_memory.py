"""Tensors as a compiled kernel sees them: an address, and strides and dtypes that somebody else wrote down."""

from collections.abc import Sequence

import torch


class ContractError(AssertionError):
    """What the real kernel would read or write wrongly, without a word."""


def require(holds: bool, message: str) -> None:
    """Fail a test whose call breaks a kernel's contract."""
    if not holds:
        raise ContractError(message)


def names(text: str) -> list[str]:
    """A launcher's parameters, in order."""
    return text.split()


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor, those of dimensions of size 1 included."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


def view_memory(
    tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The memory from a tensor's address on, by other strides (dense ones where none are given) and dtype.

    Raises:
        ContractError: it would be read past its end.
    """
    dtype = dtype or tensor.dtype
    strides = dense_strides(shape) if strides is None else strides
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.element_size()
    last = (
        sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if min(shape, default=1) else -1
    )
    end = start + (last + 1) * dtype.itemsize
    require(0 <= start <= end <= whole.numel(), f"a kernel would read bytes {start} to {end} of {whole.numel()}")
    return whole[start:end].view(dtype).as_strided(tuple(shape), tuple(strides))


def require_dense(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """A kernel that is given an address alone reads this dtype, densely."""
    require(tensor.dtype == dtype, f"{name} is {tensor.dtype}; the kernel reads {dtype}")
    require(list(tensor.shape) == list(shape), f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
    expected = dense_strides(tensor.shape)
    require(
        all(size == 1 or a == b for size, a, b in zip(tensor.shape, tensor.stride(), expected, strict=True)),
        f"{name} has strides {tensor.stride()}; the kernel reads {expected}",
    )


def require_canonical(name: str, tensor: torch.Tensor) -> None:
    """Strides that go into a tensor descriptor: multiples of 16 bytes, those of dimensions of size 1 included."""
    require(tensor.stride(-1) == 1, f"{name} has stride {tensor.stride(-1)} in its last dimension")
    require(tensor.data_ptr() % 16 == 0, f"{name} starts at an address that is no multiple of 16")
    extent = 1
    for dim in reversed(range(tensor.dim())):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        require(dim == tensor.dim() - 1 or stride * tensor.element_size() % 16 == 0, f"{name}: stride {stride}")
        require(size > 1 or stride == extent, f"{name}: dimension {dim} of size 1 has stride {stride}, not {extent}")
        extent = max(extent, size * stride)
