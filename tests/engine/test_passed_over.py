"""An environment in which vLLM would leave us out: the log says so, and what to do about it."""

import subprocess
import sys

import pytest
from engine_harness.jobs import clean_environment

pytestmark = pytest.mark.engine

# What every process of vLLM does first: settle on a platform, then load the general plugins.
START_VLLM = """
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
load_general_plugins()
print("platform:", type(current_platform).__module__)
"""
BUILT_IN, OURS = "vllm.platforms.cpu", "vllm_attn_plugin.platform"

CASES = {
    "nothing_set": ({}, OURS, None),
    "only_the_backend": (
        {"VLLM_PLUGINS": "attn_plugin"},
        BUILT_IN,
        "VLLM_PLUGINS=attn_plugin leaves out attn_plugin_cpu, so vLLM will not serve --attention-backend CUSTOM with "
        "vllm-attn-plugin; add attn_plugin,attn_plugin_cpu to VLLM_PLUGINS or unset it.",
    ),
    "only_the_platform": (
        {"VLLM_PLUGINS": "attn_plugin_cpu"},
        OURS,
        "VLLM_PLUGINS=attn_plugin_cpu leaves out attn_plugin, so vLLM will not serve --attention-backend CUSTOM with "
        "vllm-attn-plugin; add attn_plugin,attn_plugin_cpu to VLLM_PLUGINS or unset it.",
    ),
    "target_device": (
        {"VLLM_TARGET_DEVICE": "cpu"},
        BUILT_IN,
        "VLLM_TARGET_DEVICE=cpu makes vLLM skip platform plugins, so on this machine it will serve --attention-backend "
        "CUSTOM with CPU_ATTN instead; unset VLLM_TARGET_DEVICE",
    ),
}


@pytest.mark.parametrize(("variables", "platform", "warning"), CASES.values(), ids=CASES)
def test_the_log_says_that_vllm_will_pass_us_over(
    variables: dict[str, str], platform: str, warning: str | None
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START_VLLM], env=clean_environment(variables), capture_output=True, text=True, check=True
    )

    log = done.stdout + done.stderr
    assert f"platform: {platform}\n" in done.stdout
    warnings = [line for line in log.splitlines() if "--attention-backend CUSTOM" in line]
    assert len(warnings) == (0 if warning is None else 1), log
    assert warning is None or warning in warnings[0]
