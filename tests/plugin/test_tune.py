"""The tune command: what it understands, and what it refuses before anything is measured."""

import argparse

import pytest

from vllm_attn_plugin import tune
from vllm_attn_plugin.__main__ import main


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    return parser.parse_args(words)


def test_every_combination_is_measured() -> None:
    options = parse("--heads", "32/8", "8/1", "--page-size", "16", "64", "--kv-dtype", "bfloat16", "float8_e4m3fn")
    found = [str(configuration) for configuration in tune.configurations(options)]
    assert len(set(found)) == 8
    assert found[:2] == ["32x8-d128-p16-bfloat16-bfloat16-q1", "32x8-d128-p16-bfloat16-float8_e4m3fn-q1"]
    assert [str(one) for one in tune.configurations(parse("--heads", "4/4", "--dtype", "float16", "--q-len", "3"))] == [
        "4x4-d128-p16-float16-float16-q3"
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--heads", "32"), "--heads 32 is no pair of query and KV heads"),
        (("--heads", "32/5"), "--heads 32/5 is no pair of query and KV heads, the first a multiple of the second"),
        (("--heads", "8/0"), "--heads 8/0 is no pair"),
        (("--heads", "8/2", "--kv-dtype", "fp8"), "'fp8' is no dtype of torch; use one such as bfloat16"),
    ],
)
def test_option_that_is_not_understood_is_named(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(tune.TuneError, match=message):
        list(tune.configurations(parse(*words)))


def test_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["tune", "--heads", "32/8"]) == 2
    assert (
        capsys.readouterr().err
        == "error: tune measures kernels on an NVIDIA GPU, and torch finds none; run it on a machine with one.\n"
    )
