"""Blocks and the pages that they are read in."""

import pytest

from vllm_attn_plugin.block_sizes import kernel_page_size, page_sizes, preferred_block_size


@pytest.mark.parametrize(
    ("capability", "block_size", "expected"),
    [
        ((9, 0), 128, 128),
        ((9, 0), 256, 128),
        ((9, 0), 64, 64),
        ((9, 0), 544, 32),
        ((10, 0), 128, 64),
        ((8, 0), 128, 64),
        ((9, 0), None, 16),
        (None, 128, 128),
        (None, None, 16),
    ],
)
def test_a_block_is_split_into_the_largest_page_that_the_gpu_s_kernels_read(
    capability: tuple[int, int] | None, block_size: int | None, expected: int
) -> None:
    assert kernel_page_size(block_size, capability) == expected


@pytest.mark.parametrize(
    ("capability", "vllm_default", "expected"),
    [((9, 0), 16, 128), ((9, 0), 256, 256), ((8, 0), 16, 16), ((10, 0), 32, 32), (None, 128, 128)],
)
def test_only_sm90_prefers_blocks_larger_than_vllm_s(
    capability: tuple[int, int] | None, vllm_default: int, expected: int
) -> None:
    assert preferred_block_size(capability, vllm_default) == expected


def test_preferred_block_is_one_page() -> None:
    for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
        block_size = preferred_block_size(capability)
        assert block_size in page_sizes(capability)
        assert kernel_page_size(block_size, capability) == block_size
