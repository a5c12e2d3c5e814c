"""Stands in for ci.bench.engine: answers as it does, or fails as the environment says."""

import json
import os
import sys
import time
from pathlib import Path


def say(reply):
    print(json.dumps(reply), flush=True)


settings = json.loads(sys.stdin.readline())
backend = settings["llm"]["attention_backend"]
failing = json.loads(os.environ.get("FAKE_ENGINE", "{}")).get(backend, "")
print(f"INFO builder.py Attention kernels: {backend} serves.", file=sys.stderr, flush=True)
if failing == "start":
    print("ValueError: head_dim 77 is not served", file=sys.stderr, flush=True)
    say({"error": "Engine core initialization failed"})
    sys.exit(1)
served_by = "TRITON_ATTN" if failing == "other" else backend
locks = os.environ.get("CI_BENCH_LOCKS", "")
gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
say({"served_by": [served_by], "waited_s": 0.0, "ready_s": 1.0, "cache_tokens": 64, "gpu": gpu, "locks": locks})
is_awake = not settings["sleep_level"]
for line in sys.stdin:
    command = json.loads(line)
    with Path(os.environ["FAKE_ENGINE_TURNS"]).open("a") as turns:
        turns.write(f"{backend} {command['do']} {command.get('row', '')} {command.get('seed', '')}".strip() + "\n")
    assert is_awake or command["do"] == "wake_up", "asked while it sleeps"
    if command["do"] in ("wake_up", "sleep"):
        is_awake = command["do"] == "wake_up"
        say({})
    elif command["do"] == "measure" and command["seed"] == 2 and failing == "die":
        print("RuntimeError: CUDA error: an illegal memory access", file=sys.stderr, flush=True)
        os._exit(3)
    elif command["do"] == "measure" and failing == "hang":
        time.sleep(60)
    elif command["do"] == "measure":
        rate = {"CUSTOM": 110.0, "CPU_ATTN": 100.0, "FLASH_ATTN": 105.0}[backend]
        say({"output_tokens_per_s": rate + command["seed"], "accepted_per_draft": None})
    elif command["do"] == "host_times":
        say({"host": {"build": {"mean_us": 50.0, "p99_us": 70.0, "calls": 9}}})
    else:
        say({})
