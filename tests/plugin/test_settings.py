"""Settings: every value and every name is held against what is known."""

import pytest

from vllm_attn_plugin.kernels.dispatch import KERNELS
from vllm_attn_plugin.settings import Settings, SettingsError, parse, settings

NAMES = ("fast", "reference")


def test_defaults() -> None:
    assert parse({}, NAMES) == Settings(decode_kernel=None, prefill_kernel=None, check=False)
    assert parse({"PATH": "/bin", "VLLM_PLUGINS": "x"}, NAMES) == parse({}, NAMES)


@pytest.mark.parametrize("value", ["reference", "Reference", " REFERENCE "])
def test_kernels_by_name(value: str) -> None:
    parsed = parse({"VLLM_ATTN_PLUGIN_DECODE_KERNEL": value, "VLLM_ATTN_PLUGIN_PREFILL_KERNEL": "fast"}, NAMES)
    assert (parsed.decode_kernel, parsed.prefill_kernel) == ("reference", "fast")


@pytest.mark.parametrize("value", ["auto", "AUTO"])
def test_auto_leaves_the_choice_to_the_dispatch(value: str) -> None:
    assert parse({"VLLM_ATTN_PLUGIN_DECODE_KERNEL": value}, NAMES).decode_kernel is None


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), (" 1 ", True)])
def test_check_mode(value: str, expected: bool) -> None:
    assert parse({"VLLM_ATTN_PLUGIN_CHECK": value}, NAMES).check is expected


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("DECODE_KERNEL", "slow", "auto, fast, reference"),
        ("PREFILL_KERNEL", "", "auto, fast, reference"),
        ("PREFILL_KERNEL", "reference,fast", "auto, fast, reference"),
        ("CHECK", "on", "0, 1"),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: str, allowed: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse({f"VLLM_ATTN_PLUGIN_{name}": value}, NAMES)
    assert str(caught.value) == f"VLLM_ATTN_PLUGIN_{name} is {value!r}; set it to one of: {allowed}."


def test_unknown_setting_is_refused_with_those_that_exist() -> None:
    message = r"^VLLM_ATTN_PLUGIN_KERNEL is no setting of vllm-attn-plugin; the settings are: "
    with pytest.raises(SettingsError, match=message) as caught:
        parse({"VLLM_ATTN_PLUGIN_KERNEL": "reference"}, NAMES)
    for name in ("DECODE_KERNEL", "PREFILL_KERNEL", "CHECK"):
        assert f"VLLM_ATTN_PLUGIN_{name}" in str(caught.value)


def test_process_settings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTN_PLUGIN_DECODE_KERNEL", "reference")
    first = settings()
    assert first.decode_kernel == "reference"
    monkeypatch.setenv("VLLM_ATTN_PLUGIN_DECODE_KERNEL", "no such")
    assert settings() is first


@pytest.mark.parametrize("name", [*sorted(KERNELS), "auto"])
def test_every_kernel_there_is_can_be_forced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTN_PLUGIN_PREFILL_KERNEL", name)
    assert settings().prefill_kernel == (None if name == "auto" else name)
