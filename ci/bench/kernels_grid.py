"""What the kernel benchmark measures: which batches, of which layers, and about how long that takes."""

from collections.abc import Iterable, Iterator
from itertools import product

from vllm_attn_plugin.kernels import Phase
from vllm_attn_plugin.kernels.timed_batch import Point, decode_point
from vllm_attn_plugin.kernels.timing import MOST_REPLAYS, ROUND_US, ROUNDS
from vllm_attn_plugin.kernels.tuning import Configuration

HEADS = ((32, 8), (64, 8), (32, 2), (8, 1))
HEAD_DIMS = (128, 64, 256)
PAGE_SIZES = (16, 64, 128)
KV_DTYPES = ("bfloat16", "float8_e4m3fn")
Q_DTYPE = "bfloat16"
# The layer of an 8B model; the small grid changes one of its properties at a time.
CENTRE = ((32, 8), 128, 16)

FULL_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FULL_SEQ_LENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
# Of the centre: ends, middle, and where kernels cross (16 to 64 requests).
CENTRE_BATCH_SIZES = (1, 4, 16, 32, 64, 128, 256)
CENTRE_SEQ_LENS = (128, 512, 2048, 8192, 32768)
# Of its neighbours: each end and one in between.
NEAR_BATCH_SIZES = (1, 16, 64, 256)
NEAR_SEQ_LENS = (128, 1024, 8192, 32768)

PROMPTS = (512, 1024, 2048, 4096, 8192)
CACHED_PREFIX = 8192
FULL_PREFILL_BATCH_SIZES = (1, 4)

# For the estimate alone: an H200's reading and arithmetic as kernels reach them, the least time of a launch, that of
# filling the L2 cache, and what setting a kernel up and capturing it takes.
READ_BYTES_PER_US, FLOPS_PER_US, LEAST_LAYER_US, FILL_US = 3.5e6, 4e8, 8.0, 50.0
SETUP_SECONDS, POINT_SECONDS, KERNELS_EACH = 0.01, 0.02, 4


def configuration(heads: tuple[int, int], head_dim: int, page_size: int, kv_dtype: str) -> Configuration:
    """A layer whose decodes have one query token."""
    return Configuration(*heads, head_dim, page_size, Q_DTYPE, kv_dtype, q_len=1)


def grid(name: str) -> list[Point]:
    """The points of a grid, decodes first, the centre's before all others: a run that is cut short has what matters."""
    return list(GRIDS[name]())


def _small() -> Iterator[Point]:
    """One property off the centre at a time, both KV dtypes throughout."""
    heads, head_dim, page_size = CENTRE
    for kv_dtype in KV_DTYPES:
        for page in PAGE_SIZES:
            layer = configuration(heads, head_dim, page, kv_dtype)
            yield from _decodes(layer, CENTRE_BATCH_SIZES, CENTRE_SEQ_LENS)
        yield from _prefills(configuration(*CENTRE, kv_dtype), (1,))
    near = [(other, head_dim) for other in HEADS[1:]] + [(heads, other) for other in HEAD_DIMS[1:]]
    for (other_heads, other_dim), kv_dtype in product(near, KV_DTYPES):
        layer = configuration(other_heads, other_dim, page_size, kv_dtype)
        yield from _decodes(layer, NEAR_BATCH_SIZES, NEAR_SEQ_LENS)
    for other_dim in HEAD_DIMS[1:]:
        yield from _prefills(configuration(heads, other_dim, page_size, KV_DTYPES[0]), (1,))


def _medium() -> Iterator[Point]:
    """Every layer, over few batch sizes and lengths."""
    for layer in _every_layer():
        yield from _decodes(layer, NEAR_BATCH_SIZES, NEAR_SEQ_LENS)


def _full() -> Iterator[Point]:
    """Every combination."""
    for layer in _every_layer():
        yield from _decodes(layer, FULL_BATCH_SIZES, FULL_SEQ_LENS)
    for layer in _every_layer():
        yield from _prefills(layer, FULL_PREFILL_BATCH_SIZES)


def _every_layer() -> Iterator[Configuration]:
    return (configuration(*found) for found in product(HEADS, HEAD_DIMS, PAGE_SIZES, KV_DTYPES))


def _decodes(layer: Configuration, batch_sizes: Iterable[int], seq_lens: Iterable[int]) -> Iterator[Point]:
    for batch_size, seq_len in product(batch_sizes, seq_lens):
        yield decode_point(layer, batch_size, seq_len)


def _prefills(layer: Configuration, batch_sizes: Iterable[int]) -> Iterator[Point]:
    """Prompts as they come, and as chunks behind a cached prefix."""
    for batch_size, q_len, prefix in product(batch_sizes, PROMPTS, (0, CACHED_PREFIX)):
        yield Point(Phase.PREFILL, layer, batch_size, q_len, q_len + prefix)


GRIDS = {"small": _small, "medium": _medium, "full": _full}


def flops(point: Point) -> float:
    """Arithmetic of one layer: two products of the queries with the keys that they see, causally."""
    seen = point.seq_len - (point.q_len - 1) / 2
    heads = point.configuration.num_qo_heads * point.configuration.head_dim
    return 4.0 * point.batch_size * point.q_len * seen * heads


def estimated_seconds(points: Iterable[Point]) -> float:
    """About how long measuring takes on an H200, with everything compiled."""
    return sum(POINT_SECONDS + KERNELS_EACH * _kernel_seconds(point) for point in points)


def _kernel_seconds(point: Point) -> float:
    layer_us = max(LEAST_LAYER_US, point.read_bytes / READ_BYTES_PER_US, flops(point) / FLOPS_PER_US)
    replay_us = point.num_layers * layer_us
    replays = 1 + (min(MOST_REPLAYS, ROUND_US // replay_us) if replay_us <= ROUND_US / 2 else 0)
    set_up_us = 3 * replay_us  # once to see that it works, once more before the capture, and the first round
    return SETUP_SECONDS + (set_up_us + ROUNDS * replays * (replay_us + FILL_US)) / 1e6
