"""Stands in for the `vllm` executable: listens like `vllm serve`, and misbehaves as FAKE_VLLM says.

It starts a child, as vLLM starts its engine, whose process id it writes to FAKE_VLLM_CHILD.
"""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MODE = os.environ.get("FAKE_VLLM", "ok")
KERNELS = "(EngineCore pid=7) INFO 11-30 11:11:57 [b.py:1] Attention kernels: prefill=reference, decode=reference (why)"
WARNING = "(EngineCore pid=7) WARNING 11-30 11:11:57 [r.py:1] VLLM_PLUGINS=lora leaves out attn_plugin_cpu, add it"
CRASH = """\
(EngineCore pid=7) ERROR 11-30 11:11:57 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-30 11:11:57 [core.py:1100]   File "attention.py", line 3, in forward
(EngineCore pid=7) ERROR 11-30 11:11:57 [core.py:1100] ValueError: head_dim 77 is not served
(APIServer pid=5) Traceback (most recent call last):
(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.
"""


def option(name: str) -> str:
    return next(word.split("=", 1)[1] for word in sys.argv if word.startswith(f"--{name}="))


class Handler(BaseHTTPRequestHandler):
    def reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply(503 if MODE == "never-ready" else 200, {})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if MODE == "die-at-request":
            print(CRASH, flush=True)
            os._exit(3)
        if request["model"] != option("served-model-name"):
            return self.reply(404, {"error": {"message": "no such model"}})
        text = "" if MODE == "empty" else "The capital of France is Paris."
        common = {"id": "1", "created": 1, "model": request["model"]}
        if self.path == "/v1/chat/completions":
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            return self.reply(200, common | {"object": "chat.completion", "choices": [choice]})
        choice = {"index": 0, "finish_reason": "stop", "text": f", {request['prompt']} again"}
        return self.reply(200, common | {"object": "text_completion", "choices": [choice]})


def main() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    if path := os.environ.get("FAKE_VLLM_CHILD"):
        Path(path).write_text(str(child.pid))
    print("arguments:", *sys.argv[1:], flush=True)
    print("environment:", os.environ.get("VLLM_CPU_KVCACHE_SPACE"), os.environ.get("HF_HUB_OFFLINE"), flush=True)
    if MODE == "die":
        print(CRASH, flush=True)
        sys.exit(1)
    if MODE == "out-of-memory":
        os.kill(os.getpid(), signal.SIGKILL)
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: (child.terminate(), child.wait(), os._exit(0)))
    print(WARNING if MODE == "no-kernels" else KERNELS, flush=True)
    ThreadingHTTPServer((option("host"), int(option("port"))), Handler).serve_forever()


main()
