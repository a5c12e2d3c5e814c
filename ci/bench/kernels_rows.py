"""The rows of the kernel benchmark, and what they come to."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate  # type: ignore[import-untyped]

from vllm_attn_plugin.kernels import Phase
from vllm_attn_plugin.kernels.timed_batch import Point, dtype_named
from vllm_attn_plugin.kernels.timing import Measured

# FlashAttention 3 as vLLM's own backend calls it: what no choice of the dispatch can be.
PEER = "FLASH_ATTN"
# The choice may be so much slower than the fastest kernel of a point.
WITHIN = 1.02
# A decode counts as long from these on: below, a launch takes longer than reading.
LONG_SEQ_LEN, LONG_BYTES = 8192, 1 << 30
# The part of the read bandwidth that a long decode is to reach.
BANDWIDTH_GOAL = 0.95
WORST = 10


@dataclass(frozen=True)
class Row:
    """One kernel at one point; numbers are null where it was not measured.

    Attributes:
        kernel: its name; FLASH_ATTN for FlashAttention 3 as that backend of vLLM calls it.
        phase: decode or prefill.
        kv_dtype: of the cache; the query is bfloat16.
        page_size: tokens a page.
        heads: query and KV heads, such as 32/8.
        head_dim: size of a head.
        batch_size: requests.
        q_len: new tokens of each.
        seq_len: keys of each, those of the new tokens included.
        layer_us: microseconds of one layer on the GPU, median of the rounds.
        spread_us: the slowest round less the fastest.
        plan_us: microseconds of one plan on the host.
        gbps: GB/s of keys and values read, each counted once.
        chosen: the kernel that the dispatch runs this point with; empty where it refuses.
        outcome: passed, failed or refused.
        difference: how far the result lies from the first kernel's, as a part of its largest number.
        reason: why it failed or refused.
    """

    kernel: str
    phase: str
    kv_dtype: str
    page_size: int
    heads: str
    head_dim: int
    batch_size: int
    q_len: int
    seq_len: int
    layer_us: float | None
    spread_us: float | None
    plan_us: float | None
    gbps: float | None
    chosen: str
    outcome: str
    difference: float | None = None
    reason: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What its point is told from others by."""
        layer = (self.phase, self.kv_dtype, self.page_size, self.heads, self.head_dim)
        return (*layer, self.batch_size, self.q_len, self.seq_len)

    @property
    def read_bytes(self) -> int:
        """Bytes of keys and values that a layer must read, each once."""
        kv_heads = int(self.heads.partition("/")[2])
        itemsize = dtype_named(self.kv_dtype).itemsize
        return self.batch_size * self.seq_len * kv_heads * 2 * self.head_dim * itemsize


def place_of(point: Point) -> dict[str, Any]:
    """The fields of a row that say where it was measured."""
    configuration = point.configuration
    return {
        "phase": str(point.phase),
        "kv_dtype": configuration.kv_dtype,
        "page_size": configuration.page_size,
        "heads": f"{configuration.num_qo_heads}/{configuration.num_kv_heads}",
        "head_dim": configuration.head_dim,
        "batch_size": point.batch_size,
        "q_len": point.q_len,
        "seq_len": point.seq_len,
    }


def key_of(point: Point) -> tuple[Any, ...]:
    """A point's `Row.key`."""
    return tuple(place_of(point).values())


def measured_row(point: Point, kernel: str, chosen: str, measured: Measured, difference: float) -> Row:
    """A row of a kernel that was timed."""
    return Row(
        kernel=kernel,
        **place_of(point),
        layer_us=measured.layer_us,
        spread_us=measured.spread_us,
        plan_us=measured.plan_us,
        gbps=round(point.read_bytes / measured.layer_us / 1e3, 1),
        chosen=chosen,
        outcome="passed",
        difference=float(f"{difference:.3g}"),
    )


def unmeasured_row(point: Point, kernel: str, chosen: str, outcome: str, reason: str) -> Row:
    """A row of a kernel that refused or failed."""
    return Row(
        kernel=kernel,
        **place_of(point),
        layer_us=None,
        spread_us=None,
        plan_us=None,
        gbps=None,
        chosen=chosen,
        outcome=outcome,
        reason=reason,
    )


def by_point(rows: Iterable[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Rows by point, then kernel."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.key, {})[row.kernel] = row
    return found


def regret(rows: Mapping[str, Row], without: str = "") -> float | None:
    """By what factor the dispatch's choice is slower than the fastest kernel of a point.

    None where nothing was measured; infinite where its choice was not, though another was.

    Args:
        rows: of one point, by kernel.
        without: a kernel that does not count.
    """
    times = {name: row.layer_us for name, row in rows.items() if row.layer_us is not None and name != without}
    if not times:
        return None
    chosen = next(iter(rows.values())).chosen
    return times[chosen] / min(times.values()) if chosen in times else float("inf")


def summary(rows: Sequence[Row], read_bandwidth_gbps: float) -> dict[str, Any]:
    """What the rows come to: by phase the choice against the fastest, and long decodes against the bandwidth."""
    found: dict[str, Any] = {}
    for phase in Phase:
        points = {key: some for key, some in by_point(rows).items() if key[0] == phase}
        factors = {key: factor for key, some in points.items() if (factor := regret(some)) is not None}
        own = [factor for some in points.values() if (factor := regret(some, without=PEER)) is not None]
        worst = sorted(factors, key=lambda key: -factors[key])[:WORST]
        found[str(phase)] = {
            "points": len(factors),
            "within": _share_within(factors.values()),
            "within_own": _share_within(own),
            "worst": [_worst(points[key], factors[key]) for key in worst if factors[key] > 1],
        }
    shares = [share for some in by_point(rows).values() if (share := _bandwidth_share(some, read_bandwidth_gbps))]
    found["long_decodes"] = {
        "points": len(shares),
        "least": round(min(shares), 4) if shares else None,
        "median": round(sorted(shares)[len(shares) // 2], 4) if shares else None,
        "reached": round(sum(share >= BANDWIDTH_GOAL for share in shares) / len(shares), 4) if shares else None,
    }
    return found


def _share_within(factors: Collection[float]) -> float | None:
    """The share of points where the choice is about as fast as the fastest."""
    return round(sum(factor <= WITHIN for factor in factors) / len(factors), 4) if factors else None


def _worst(rows: Mapping[str, Row], factor: float) -> dict[str, Any]:
    """A point where the choice is not the fastest."""
    times = {name: row.layer_us for name, row in rows.items() if row.layer_us is not None}
    first = next(iter(rows.values()))
    place = {name: getattr(first, name) for name in ("phase", "kv_dtype", "page_size", "heads", "head_dim")}
    place |= {"batch": f"{first.batch_size}x{first.seq_len}" + (f" ({first.q_len} new)" if first.q_len > 1 else "")}
    # JSON has no infinity.
    known = round(factor, 3) if factor != float("inf") else None
    return place | {"chosen": first.chosen, "fastest": min(times, key=lambda name: times[name]), "factor": known}


def _bandwidth_share(rows: Mapping[str, Row], read_bandwidth_gbps: float) -> float | None:
    """The part of the read bandwidth that the dispatch's choice reaches at a long decode; None at any other point."""
    row = rows.get(next(iter(rows.values())).chosen)
    if row is None or row.gbps is None or row.phase != Phase.DECODE:
        return None
    is_long = row.seq_len >= LONG_SEQ_LEN and row.read_bytes >= LONG_BYTES
    return row.gbps / read_bandwidth_gbps if is_long else None


def summary_lines(found: Mapping[str, Any], read_bandwidth_gbps: float) -> list[str]:
    """A summary as it is printed."""
    lines = []
    for phase in Phase:
        part = found[phase]
        if not part["points"]:
            continue
        lines.append(
            f"{phase}: the choice is within {WITHIN - 1:.0%} of the fastest kernel at {part['within']:.1%} of "
            f"{part['points']} points, of this package's at {part['within_own'] or 0:.1%}"
        )
        if part["worst"]:
            lines.append(tabulate(part["worst"], headers="keys"))
    long = found["long_decodes"]
    if long["points"]:
        lines.append(
            f"long decodes (from {LONG_SEQ_LEN} tokens and {LONG_BYTES >> 30} GiB a layer) read at {long['least']:.1%} "
            f"to {long['median']:.1%} (median) of {read_bandwidth_gbps:.0f} GB/s; {long['reached']:.1%} of "
            f"{long['points']} reach {BANDWIDTH_GOAL:.0%}"
        )
    return lines
