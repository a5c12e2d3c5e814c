"""What a real engine in check mode must say of each fault, on any device."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("check_mode_run.py")
LAYERS = r"layer model\.layers\.0\.self_attn\.attn and 1 more of its KV-cache group, "
FILE = r"\. Run this step again with: python -m vllm_attn_plugin replay (\S+\.json)"
SAID = {
    "page": LAYERS
    + r"request 1, block_tables\[1, 0\] is (\d+); the limit is 0 to \d+, since the KV cache has \1 pages",
    "length": LAYERS + r"request 1, seq_lens\[1\] is \d+; the limit is \d+, which its block table row of \d+ pages",
    "slot": LAYERS + r"request \d, slot_mapping\[1\] is \d+; the limit is a slot of its own, and token 0 is written",
    "counter": LAYERS + r"byte 7 of XQA's counters is 1; the limit is 0 before each launch",
}


def run_engine(check: bool, folder: Path, variables: dict[str, str] | None = None) -> dict[str, Any]:
    """Run the script; what it printed. `folder` is where the files of steps at fault go."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_ATTN_PLUGIN_")}
    environment |= {"TMPDIR": str(folder), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **(variables or {})}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(int(check))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("answer ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(lines[0].removeprefix("answer "))
    return answer
