"""The tune command: what it understands, and what it refuses before anything is measured."""

from collections.abc import Callable

import pytest
import torch

from vllm_attn_plugin import tune
from vllm_attn_plugin.__main__ import main
from vllm_attn_plugin.kernels.timing import Runner
from vllm_attn_plugin.kernels.tuning import Configuration, Timing


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tune.Asked]:
    """What the command line asks for."""
    taken: list[tune.Asked] = []
    monkeypatch.setattr(tune, "run", lambda asked: taken.append(asked) or [])

    def parse(*words: str) -> tune.Asked:
        assert main(["tune", *words]) == 0
        return taken.pop()

    return parse


def test_every_combination_is_measured(asked: Callable[..., tune.Asked]) -> None:
    options = asked("--heads", "32/8", "8/1", "--page-size", "16", "64", "--kv-dtype", "bfloat16", "float8_e4m3fn")
    assert options.heads == ("32/8", "8/1")
    assert options.page_size == asked("--heads", "1/1", "--page-size", "16", "--page-size", "64").page_size == (16, 64)
    found = [str(configuration) for configuration in tune.configurations(options)]
    assert len(set(found)) == 8
    assert found[:2] == ["32x8-d128-p16-bfloat16-bfloat16-q1", "32x8-d128-p16-bfloat16-float8_e4m3fn-q1"]
    drafts = asked("--heads", "4/4", "--page-size", "16", "--dtype", "float16", "--q-len", "3")
    assert [str(one) for one in tune.configurations(drafts)] == ["4x4-d128-p16-float16-float16-q3"]
    assert (drafts.batch_sizes, drafts.seq_lens, drafts.output) == (tune.BATCH_SIZES, tune.SEQ_LENS, None)


@pytest.mark.parametrize(("capability", "page_size"), [((8, 0), 16), ((9, 0), 128), ((10, 0), 16)])
def test_pages_are_those_of_serving_where_none_are_named(
    capability: tuple[int, int], page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Configuration] = []

    def remember(configuration: Configuration, *_: object) -> None:
        measured.append(configuration)
        raise tune.TuneError("enough")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    for name in ("tune", "CudaClock", "most_cache_bytes", "load_cache_operators"):
        monkeypatch.setattr(tune, name, remember if name == "tune" else lambda: None)
    for given in ((), (32,)):
        with pytest.raises(tune.TuneError, match="enough"):
            list(tune.run(tune.Asked(heads=("32/8",), page_size=given)))
    assert [one.page_size for one in measured] == [page_size, 32]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--heads", "32"), "--heads 32 is no pair of query and KV heads"),
        (("--heads", "32/5"), "--heads 32/5 is no pair of query and KV heads, the first a multiple of the second"),
        (("--heads", "8/0"), "--heads 8/0 is no pair"),
        (
            ("--heads", "8/2", "--page-size", "8", "--kv-dtype", "fp8"),
            "'fp8' is no dtype of torch; use one such as bfloat16",
        ),
    ],
)
def test_option_that_is_not_understood_is_named(
    words: tuple[str, ...], message: str, asked: Callable[..., tune.Asked]
) -> None:
    with pytest.raises(tune.TuneError, match=message):
        list(tune.configurations(asked(*words)))


def test_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["tune", "--heads", "32/8"]) == 2
    assert (
        capsys.readouterr().err
        == "error: tune measures kernels on an NVIDIA GPU, and torch finds none; run it on a machine with one.\n"
    )


class ToldClock:
    """Says how long a kernel takes on a shape."""

    def __init__(self, times: Callable[[str, int, int], float]) -> None:
        self.times = times

    def replay_us(self, runner: Runner) -> float:
        return self.times(*runner.replay())  # type: ignore[misc]

    def plan_us(self, runner: Runner) -> float:
        return 2.0


CONFIGURATION = Configuration(4, 2, 64, 16, "bfloat16", "bfloat16", 1)
CPU = torch.device("cpu")


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tune.Found]:
    """Tune two kernels that exist by name alone."""
    monkeypatch.setattr(tune, "kernels_for", lambda *_: ["xqa", "flashinfer-fa2"])
    monkeypatch.setattr(
        tune,
        "prepare",
        lambda shape, name: Runner(
            lambda: None, lambda: (name, shape.point.batch_size, shape.point.seq_len), shape.point.num_layers
        ),
    )

    def run(
        times: Callable[[str, int, int], float], batch_sizes: list[int], seq_lens: list[int], most: int = 1 << 30
    ) -> tune.Found:
        def replay_us(name: str, batch_size: int, seq_len: int) -> float:
            return times(name, batch_size, seq_len) * tune.decode_point(CONFIGURATION, batch_size, seq_len).num_layers

        return tune.tune(CONFIGURATION, batch_sizes, seq_lens, CPU, ToldClock(replay_us), most)

    return run


def test_table_keeps_what_was_measured_and_the_evidence_beside_it(tuned: Callable[..., tune.Found]) -> None:
    found = tuned(lambda name, batch, length: batch + length / 100 + (name == "xqa"), [2, 1], [64, 16])
    assert [(one.batch_size, one.seq_len) for one in found.timings] == [(1, 16), (1, 64), (2, 16), (2, 64)]
    assert found.timings[1].microseconds == {"xqa": 2.64, "flashinfer-fa2": 1.64}
    assert found.rows[0] == {
        "batch_size": 1, "seq_len": 16, "kernel": "xqa", "layer_us": 2.16, "spread_us": 0.0, "plan_us": 2.0,
    }  # fmt: skip
    table = found.table("NVIDIA H200", "0.7.2")
    assert table.fastest(("xqa", "flashinfer-fa2"), 64) == [(1, "flashinfer-fa2"), (2, "flashinfer-fa2")]


def test_kernel_far_behind_at_both_neighbours_is_passed_over(tuned: Callable[..., tune.Found]) -> None:
    def times(name: str, batch_size: int, seq_len: int) -> float:
        return 1.0 if name == "flashinfer-fa2" else (3.0 if batch_size >= 2 and seq_len >= 32 else 1.5)

    found = tuned(times, [1, 2, 4, 8], [16, 32, 64, 128])
    left_out = {(one.batch_size, one.seq_len) for one in found.timings if "xqa" not in one.microseconds}
    # The edge is measured, and so is what lies between two that were passed over: nothing measured speaks of it.
    assert left_out == {(4, 64), (4, 128), (8, 64)}
    reasons = [row["passed_over"] for row in found.rows if "passed_over" in row]
    assert reasons == ["over 2 times the fastest at the next smaller batch size and length"] * 3


def test_kernel_that_comes_back_at_a_neighbour_is_measured_again() -> None:
    found = tune.Found(CONFIGURATION)
    for place, microseconds in {
        (1, 128): {"xqa": 3.0, "flashinfer-fa2": 1.0},
        (1, 512): {"xqa": 1.9, "flashinfer-fa2": 1.0},
        (2, 128): {"flashinfer-fa2": 1.0},
        (4, 128): {"xqa": 9.0, "flashinfer-fa2": 1.0},
        (4, 512): {"flashinfer-fa2": 1.0},
    }.items():
        found.timings.append(Timing(*place, microseconds))
    assert not found.is_hopeless("xqa", 1, 1024), "no smaller batch size to compare with"
    assert not found.is_hopeless("xqa", 2, 512), "less than twice the fastest at 1 x 512"
    assert not found.is_hopeless("xqa", 8, 64), "no shorter length to compare with"
    found.timings.append(Timing(8, 128, {"flashinfer-fa2": 1.0}))
    assert not found.is_hopeless("xqa", 8, 512), "passed over at both: nothing that was measured speaks against it"
    assert not found.is_hopeless("flashinfer-fa2", 8, 512)


def test_points_that_do_not_fit_are_left_out_and_none_is_said(tuned: Callable[..., tune.Found]) -> None:
    page = 16 * 2 * 2 * 64 * 2
    found = tuned(lambda *_: 1.0, [1, 2], [16, 32], 3 * page)
    assert [(one.batch_size, one.seq_len) for one in found.timings] == [(1, 16), (1, 32), (2, 16)]
    with pytest.raises(
        tune.TuneError, match=r"no shape of 4x2-.* fits: the smallest takes 16384 bytes a layer, and 100"
    ):
        tuned(lambda *_: 1.0, [1], [16], 100)
