"""ci.contract_deletions: its list fits the source and its saved result, and it tells a noticed step from another."""

import json
import shutil
from collections import Counter

import pytest

from ci import contract_deletions
from ci.console import UserError
from ci.deletions import DELETIONS, Deletion


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untouched")
    contract_deletions.copy_package(folder)
    return folder


@pytest.mark.parametrize("deletion", DELETIONS, ids=lambda deletion: f"{deletion.file}: {deletion.what}")
def test_every_deletion_fits_the_source(deletion, copy, tmp_path):
    shutil.copytree(copy / "vllm_attn_plugin", tmp_path / "vllm_attn_plugin")
    contract_deletions.apply(deletion, tmp_path)


def test_no_deletion_is_listed_twice():
    assert Counter((deletion.file, deletion.what) for deletion in DELETIONS).most_common(1)[0][1] == 1


def test_saved_result_is_that_of_this_list_and_every_step_is_noticed():
    rows = json.loads(contract_deletions.RESULT.read_text())["rows"]
    found = [(row["file"], row["deletion"], row["old"], row["new"]) for row in rows]
    assert found == [(d.file, d.what, d.old, d.new) for d in DELETIONS]
    assert all(row["caught_by"] for row in rows)


@pytest.mark.parametrize("old", ["no such line", "return"])
def test_text_that_is_not_there_exactly_once_is_refused(old, copy, tmp_path):
    shutil.copytree(copy / "vllm_attn_plugin", tmp_path / "vllm_attn_plugin")
    stale = Deletion("stale", "kernels/kv_cache.py", old, "", ())
    with pytest.raises(UserError, match=r"times, not once: bring the deletion 'stale' of ci/deletions.py up to"):
        contract_deletions.apply(stale, tmp_path)


FEW = ("tests/kernels/test_kv_cache.py::test_fp8_store_saturates",)


@pytest.mark.parametrize(
    ("old", "new", "caught"),
    [
        (".clamp_(-limit, limit)", "", ["tests/kernels/test_kv_cache.py::test_fp8_store_saturates"]),
        (".clamp_(-limit, limit)", ".clamp_(min=-limit, max=limit)", []),
    ],
)
def test_a_step_that_matters_is_noticed_and_another_is_not(old, new, caught, copy):
    row = contract_deletions.try_deletion(Deletion("x", "kernels/kv_cache.py", old, new, FEW), copy)
    assert row["caught_by"] == caught
