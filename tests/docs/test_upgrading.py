"""docs/upgrading.md against the sources and the installed vLLM: what is used is listed, and is there."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, get_type_hints

import dependencies
import pytest
from documents import ROOT, spans_in, table
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from vllm_attn_plugin.backend import AttnPluginBackend
from vllm_attn_plugin.builder import AttnPluginMetadataBuilder
from vllm_attn_plugin.impl import AttnPluginImpl
from vllm_attn_plugin.platform import AttnPluginCpuPlatform

PAGE = (ROOT / "docs" / "upgrading.md").read_text(encoding="utf-8")
BASES: dict[type[Any], type[Any]] = {
    AttnPluginBackend: AttentionBackend,
    AttnPluginMetadataBuilder: AttentionMetadataBuilder,
    AttnPluginImpl: AttentionImpl,
    AttnPluginCpuPlatform: AttnPluginCpuPlatform.__mro__[1],
}
# A CPU build has no compiled FlashAttention: its module is there and cannot be imported.
NOT_ON_A_CPU = {"vllm.vllm_flash_attn"}
FIELDS = {spans_in(of)[0] if spans_in(of) else of: set(spans_in(fields)) for of, fields in table(PAGE, "fields")}


def written(name: str) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """A table's names by module and files by module."""
    rows = [[spans_in(cell) for cell in row] for row in table(PAGE, name)]
    return {m[0]: set(names) for m, names, *_ in rows}, {m[0]: set(files) for m, _, files, *_ in rows}


@pytest.mark.parametrize("package", ["vllm", "flashinfer"])
def test_modules_names_and_files_are_those_of_the_sources(package: str) -> None:
    assert written(package) == dependencies.imported(package)


def test_what_is_used_by_name_is_listed() -> None:
    assert {spans_in(name)[0] for name, _ in table(PAGE, "by_name")} == dependencies.by_name()


@pytest.mark.parametrize("module", [m for m in written("vllm")[0] if m not in NOT_ON_A_CPU])
def test_installed_vllm_has_every_name(module: str) -> None:
    found = import_module(module)
    assert {name for name in written("vllm")[0][module] if not hasattr(found, name)} == set()


@pytest.mark.parametrize("module", sorted(written("vllm")[0]))
def test_installed_vllm_has_every_module(module: str) -> None:
    assert find_spec(module) is not None


def test_overridden_methods_are_those_that_the_base_classes_have() -> None:
    hooks = {spans_in(name)[0]: set(spans_in(methods)) for name, methods in table(PAGE, "hooks")}
    found = {}
    for ours, base in BASES.items():
        public = {name for name in vars(ours) if not name.startswith("_")}
        found[ours.__name__] = {name for name in public if hasattr(base, name)}
    assert hooks == found


def test_no_method_is_an_override_of_what_the_base_has_no_more() -> None:
    """A hook that vLLM renames would be left behind as a method that nobody calls."""
    own = {
        f"{ours.__name__}.{name}"
        for ours, base in BASES.items()
        for name in vars(ours)
        if not name.startswith("_") and not hasattr(base, name)
    }
    assert own == {"AttnPluginImpl.do_kv_cache_update"}


def test_fields_read_are_listed() -> None:
    assert FIELDS["CommonAttentionMetadata"] == dependencies.of_common_metadata()
    assert FIELDS["VllmConfig"] == dependencies.of_configuration()
    assert FIELDS["the attention layer"] == dependencies.of_layer()


def test_installed_vllm_has_every_field() -> None:
    assert FIELDS["CommonAttentionMetadata"] <= set(CommonAttentionMetadata.__dataclass_fields__)
    parts = get_type_hints(VllmConfig)
    for field in FIELDS["VllmConfig"]:
        part, _, name = field.partition(".")
        assert hasattr(parts[part], name) or name in parts[part].__dataclass_fields__, field


def test_platform_is_asked_for_what_it_answers() -> None:
    for name in dependencies.reads("vllm_attn_plugin/backend.py", {"current_platform"}):
        assert hasattr(current_platform, name)
