"""Run one step of 100 tokens over a large cache in each layout and print the peak memory of each as JSON.

Run by the memory tests in an interpreter of its own, since a peak belongs to a process.
"""

import ctypes
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from batch_specs import BatchSpec
from paged_cases import LAYOUTS, PagedCase, make_layer
from vllm_doubles import common_metadata, make_builder, make_case, make_layer_double, new_tokens

# 4 decodes and a 96-token chunk, over about 1,000 tokens of context each: SmolLM2's heads.
SPEC = BatchSpec("hundred_tokens", (1, 1, 1, 1, 96), (1000, 1200, 800, 1024, 1096))
PAGE_SIZE, NUM_LAYERS, LAYER = 16, 2, 1


def memory_mib(name: str) -> float:
    """A line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


def reset_peak() -> float:
    """Let the peak start again at the memory held now, and return that."""
    # Memory that earlier steps freed would hide as much of this one's.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return memory_mib("VmRSS")


def large_cache(case: PagedCase, layout: str, gib: float) -> torch.Tensor:
    """A layer's view of a buffer of `gib`, of which nothing is resident until it is touched.

    Where the layers lie inside a block the view spans the whole buffer; elsewhere there is one layer.
    """
    layers = NUM_LAYERS if layout.startswith("B") else 1
    content = 2 * case.layer.head_dim
    page_bytes = layers * case.layer.num_kv_heads * PAGE_SIZE * content * case.kv_cache.element_size()
    num_pages = -(-int(gib * 2**30) // page_bytes)
    order, _ = LAYOUTS[layout]
    extent = {"L": layers, "B": num_pages, "H": case.layer.num_kv_heads, "N": PAGE_SIZE, "C": content}
    buffer = torch.empty([extent[axis] for axis in order], dtype=case.kv_cache.dtype)
    return buffer.permute([order.index(axis) for axis in "LBHNC"])[layers - 1]


def spread(case: PagedCase, cache: torch.Tensor) -> None:
    """Move the case into the large cache, its pages all over it."""
    stride = cache.shape[0] // case.num_pages
    cache[torch.arange(case.num_pages) * stride] = case.kv_cache
    owned = case.block_tables < case.num_pages
    case.block_tables[owned] *= stride
    case.slot_mapping = case.slot_mapping // PAGE_SIZE * stride * PAGE_SIZE + case.slot_mapping % PAGE_SIZE
    case.kv_cache = cache


def measure(layout: str, dtype: torch.dtype, gib: float) -> dict[str, object]:
    """One step through the builder and the impl, as vLLM runs it."""
    case = make_case(SPEC, make_layer(num_qo_heads=9, num_kv_heads=3, kv_dtype=dtype), layout="LBHNC")
    spread(case, large_cache(case, layout, gib))
    layer = make_layer_double(case)
    builder = make_builder(case, {"layer": layer})
    k, v = new_tokens(case)
    output = torch.empty_like(case.q)
    before = reset_peak()
    metadata = builder.build(0, common_metadata(case))
    layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, case.slot_mapping)
    layer.impl.forward(layer, case.q, k, v, layer.kv_cache, metadata, output)
    growth = memory_mib("VmHWM") - before
    exact, _ = case.expected()
    return {
        "growth_mib": growth,
        "num_tokens": len(output),
        "cache_gib": case.kv_cache.untyped_storage().nbytes() / 2**30,
        "is_right": bool((output.double() - exact).abs().max() < 1e-4),
    }


def measure_copy(gib: float) -> dict[str, object]:
    """What the measurement says of a step that makes its cache contiguous: proof that it would notice."""
    case = make_case(SPEC, make_layer(num_qo_heads=9, num_kv_heads=3), layout="LBHNC")
    cache = large_cache(case, "LBNHC", gib)
    before = reset_peak()
    copy = cache.contiguous()
    return {"growth_mib": memory_mib("VmHWM") - before, "copied": copy.shape[0]}


def main() -> None:
    """Measure every layout and dtype."""
    gib = float(sys.argv[1])
    results = {
        f"{layout} {str(dtype).removeprefix('torch.')}": measure(layout, dtype, gib)
        for layout in ("LBHNC", "LBNHC", "BLHNC")
        for dtype in (torch.float32, torch.float8_e4m3fn)
    }
    results["copy of LBNHC float32"] = measure_copy(1.0)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
