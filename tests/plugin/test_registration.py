"""The entry points: installed, callable again and again, and loud where vLLM would pass us over."""

import logging
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

import vllm_attn_plugin
from vllm_attn_plugin import registration
from vllm_attn_plugin.backend import AttnPluginBackend
from vllm_attn_plugin.platform import AttnPluginCpuPlatform
from vllm_attn_plugin.plugin_filters import GENERAL_PLUGIN, PLATFORM_PLUGIN, reasons_passed_over


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("vllm.general_plugins", "attn_plugin", "vllm_attn_plugin:register"),
        ("vllm.platform_plugins", "attn_plugin_cpu", "vllm_attn_plugin:cpu_platform"),
    ],
)
def test_entry_points_are_installed(group: str, name: str, value: str) -> None:
    (found,) = entry_points(group=group, name=name)
    assert found.value == value
    assert name in (GENERAL_PLUGIN, PLATFORM_PLUGIN)


@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.platform_plugins"])
def test_entry_points_can_be_called_after_everything_is_imported(group: str) -> None:
    """vLLM loads them more than once a process; by then the modules they name have been imported."""
    (found,) = (point for point in entry_points(group=group) if point.module == "vllm_attn_plugin")
    assert callable(found.load())
    found.load()()
    assert callable(found.load())


def test_register_again_changes_nothing() -> None:
    for _ in range(3):
        vllm_attn_plugin.register()
        assert AttentionBackendEnum.CUSTOM.get_path() == "vllm_attn_plugin.backend.AttnPluginBackend"
        assert AttentionBackendEnum.CUSTOM.get_class() is AttnPluginBackend


def test_nothing_is_wrong_with_a_plain_environment() -> None:
    assert reasons_passed_over(is_cpu=True, variables={}) == []


@pytest.mark.parametrize(
    "plugins", ["attn_plugin,attn_plugin_cpu", "attn_plugin_cpu,other,attn_plugin"], ids=["both", "both_and_another"]
)
def test_plugins_that_name_both_are_fine(plugins: str) -> None:
    assert reasons_passed_over(is_cpu=True, variables={"VLLM_PLUGINS": plugins}) == []


@pytest.mark.parametrize(
    ("plugins", "missing"),
    [
        ("", "attn_plugin and attn_plugin_cpu"),
        ("other", "attn_plugin and attn_plugin_cpu"),
        ("attn_plugin", "attn_plugin_cpu"),
        ("attn_plugin_cpu", "attn_plugin"),
        ("attn_plugin_cpu,attn_plugin_more", "attn_plugin"),
    ],
)
def test_plugins_that_leave_one_out(plugins: str, missing: str) -> None:
    (reason,) = reasons_passed_over(is_cpu=True, variables={"VLLM_PLUGINS": plugins})
    assert reason.startswith(f"VLLM_PLUGINS={plugins} leaves out {missing}, so vLLM will not serve")
    assert reason.endswith("add attn_plugin,attn_plugin_cpu to VLLM_PLUGINS or unset it.")


def test_target_device_is_the_first_reason() -> None:
    (reason,) = reasons_passed_over(is_cpu=True, variables={"VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": "other"})
    assert reason.startswith("VLLM_TARGET_DEVICE=cpu makes vLLM skip platform plugins")
    assert "unset VLLM_TARGET_DEVICE" in reason
    assert reasons_passed_over(is_cpu=True, variables={"VLLM_TARGET_DEVICE": "cuda"}) == []


@pytest.mark.parametrize("variables", [{}, {"VLLM_TARGET_DEVICE": "cpu"}, {"VLLM_PLUGINS": "attn_plugin"}])
def test_off_the_cpu_the_platform_plugin_is_not_missed(variables: dict[str, str]) -> None:
    assert reasons_passed_over(is_cpu=False, variables=variables) == []


def test_off_the_cpu_the_general_plugin_is_missed() -> None:
    """Without it CUSTOM is never registered. Only the platform entry point could still say so, and only on a CPU."""
    assert reasons_passed_over(is_cpu=False, variables={"VLLM_PLUGINS": "other"}) == []


class Recorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.levelname}: {record.getMessage()}")


@pytest.fixture
def log() -> Any:
    recorder = Recorder()
    registration.logger.addHandler(recorder)
    yield recorder.messages
    registration.logger.removeHandler(recorder)


@pytest.mark.parametrize("entry_point", ["register", "cpu_platform"])
def test_both_entry_points_warn(entry_point: str, log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_is_cpu_build", lambda: True)
    # A value of its own for each: vLLM's logger says the same thing once.
    monkeypatch.setenv("VLLM_PLUGINS", f"only_{entry_point}")
    getattr(vllm_attn_plugin, entry_point)()
    assert [line for line in log if line.startswith(f"WARNING: VLLM_PLUGINS=only_{entry_point} leaves out")]


def test_too_old_a_vllm_is_named_and_nothing_registered(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "find_spec", lambda name: None)
    monkeypatch.setattr(registration, "BACKEND_PATH", "must.not.be.registered")
    vllm_attn_plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_path() != "must.not.be.registered"
    assert any("needs vLLM 0.32 or newer" in line and "upgrade vLLM" in line for line in log)


def test_platform_is_offered_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_is_cpu_build", lambda: True)
    assert vllm_attn_plugin.cpu_platform() == "vllm_attn_plugin.platform.AttnPluginCpuPlatform"
    monkeypatch.setattr(registration, "_is_cpu_build", lambda: False)
    assert vllm_attn_plugin.cpu_platform() is None


def selector(**changes: Any) -> AttentionSelectorConfig:
    arguments: dict[str, Any] = {"head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 16}
    return AttentionSelectorConfig(**{**arguments, **changes})


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM chose another platform")
def test_platform_is_the_one_vllm_runs_on() -> None:
    assert isinstance(current_platform, AttnPluginCpuPlatform)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM chose another platform")
def test_platform_honours_custom_and_leaves_the_rest_to_vllm() -> None:
    vllm_attn_plugin.register()
    path = AttnPluginCpuPlatform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, selector())
    assert path == "vllm_attn_plugin.backend.AttnPluginBackend"
    for selected in (None, AttentionBackendEnum.CPU_ATTN):
        path = AttnPluginCpuPlatform.get_attn_backend_cls(selected, selector())
        assert path == AttentionBackendEnum.CPU_ATTN.get_path()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "dtype torch.float64 not supported; use one of: float32, float16, bfloat16"),
        ({"block_size": 20}, "block_size 20 not supported; use a multiple of 16"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype 'int3' not supported; use one of: auto"),
        ({"use_mla": True}, "MLA not supported"),
    ],
    ids=["dtype", "block_size", "kv_cache_dtype", "mla"],
)
def test_platform_says_why_custom_cannot_serve(changes: dict[str, Any], reason: str) -> None:
    vllm_attn_plugin.register()
    with pytest.raises(ValueError, match=r"^Selected backend CUSTOM cannot serve this model on a CPU: ") as caught:
        AttnPluginCpuPlatform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, selector(**changes))
    assert reason in str(caught.value)
