"""Engine runs as jobs: plain data in, plain data out, one after another in a child process.

The child imports vLLM once, which takes longer than to start an engine, and builds a fresh engine for every job. vLLM
is imported inside functions: the process that only sends jobs stays light.
"""

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

HARNESS_PARENT = Path(__file__).parents[1]
PROBE = "engine_harness.probe.AttentionProbe"

KV_CACHE_BYTES = 384 << 20

# Every process of a test starts with these; what a user's shell sets for vLLM or for us must not change a test.
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": str(HARNESS_PARENT),
}
# But for how many cores an engine takes: who runs several at a time says it.
KEPT = frozenset({"VLLM_CPU_OMP_THREADS_BIND"})
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
OUT_OF_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@dataclass(frozen=True)
class Pass:
    """Prompts handed to the engine at once, with one set of sampling parameters.

    Attributes:
        prompts: token ids.
        sampling: what differs from greedy sampling that ignores the end-of-sequence token.
    """

    prompts: list[list[int]]
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One engine and what it is asked.

    Attributes:
        model: the model's folder.
        backend: `CUSTOM` or `CPU_ATTN`.
        passes: in order.
        engine: arguments of `LLM`.
        variables: environment variables of this engine alone.
    """

    model: Path
    backend: str
    passes: list[Pass]
    engine: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """What came of one prompt.

    Attributes:
        tokens: generated token ids.
        cached: how many of the prompt's tokens the prefix cache served.
        gaps: by how much the most likely token beat the next, in nats, for each generated token; empty unless asked.
        prompt_logprobs: of each prompt token after the first; empty unless asked.
    """

    tokens: list[int]
    cached: int
    gaps: list[float]
    prompt_logprobs: list[float]


@dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Attributes:
        passes: completions, in the order of the prompts.
        report: what the probe saw, see `AttentionProbe.attention_report`.
        cache: how full the KV cache was, see `_watch_cache`; empty where the engine ran in a process of its own.
        pid: the process that ran the job.
    """

    passes: list[list[Completion]]
    report: dict[str, Any]
    cache: dict[str, int]
    pid: int


@dataclass(frozen=True)
class Refusal:
    """The exception that kept an engine from starting.

    Attributes:
        kind: its class.
        message: its text.
        ours: names of the functions of vllm-attn-plugin on the way to it, and to every exception it arose from.
        chain: class and text of the exceptions that it arose from, nearest first.
    """

    kind: str
    message: str
    ours: list[str]
    chain: list[tuple[str, str]]


def clean_environment(variables: dict[str, str]) -> dict[str, str]:
    """This process's environment without anyone's vLLM settings, plus what every test sets, plus `variables`."""
    kept = {name: value for name, value in os.environ.items() if name in KEPT or not name.startswith("VLLM_")}
    paths = [VARIABLES["PYTHONPATH"], *filter(None, [kept.get("PYTHONPATH")])]
    return kept | VARIABLES | {"PYTHONPATH": os.pathsep.join(paths)} | variables


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables and undo every change, those that vLLM makes for its children included."""
    saved = dict(os.environ)
    wanted = clean_environment(variables)
    try:
        os.environ.clear()
        os.environ.update(wanted)
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _make_llm(job: Job) -> Any:
    from vllm import LLM

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1280,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "skip_tokenizer_init": True,
        "worker_extension_cls": PROBE,
        "attention_backend": job.backend,
    }
    return LLM(str(job.model), **defaults | job.engine)


def _completion(output: Any) -> Completion:
    best = output.outputs[0]
    gaps = []
    for entries in best.logprobs or []:
        first, second = sorted((entry.logprob for entry in entries.values()), reverse=True)[:2]
        gaps.append(first - second)
    prompt_logprobs = [
        entries[token].logprob
        for token, entries in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False)
        if entries is not None
    ]
    return Completion(list(best.token_ids), output.num_cached_tokens or 0, gaps, prompt_logprobs)


def _run_pass(llm: Any, one: Pass) -> list[Completion]:
    from vllm import SamplingParams

    greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    parameters = SamplingParams(**greedy | one.sampling)
    prompts = [{"prompt_token_ids": prompt} for prompt in one.prompts]
    return [_completion(output) for output in llm.generate(prompts, parameters, use_tqdm=False)]


def _watch_cache(llm: Any) -> dict[str, int]:
    """Follow the scheduler of an engine in this process: fewest blocks free at any step, and preemptions."""
    scheduler = getattr(getattr(llm.llm_engine.engine_core, "engine_core", None), "scheduler", None)
    if scheduler is None:
        return {}
    pool = scheduler.kv_cache_manager.block_pool
    seen = {"blocks": pool.num_gpu_blocks, "least_free": pool.get_num_free_blocks(), "preemptions": 0}
    schedule, preempt = scheduler.schedule, scheduler._preempt_request

    def watched_schedule(*arguments: Any, **named: Any) -> Any:
        output = schedule(*arguments, **named)
        seen["least_free"] = min(seen["least_free"], pool.get_num_free_blocks())
        return output

    def watched_preempt(*arguments: Any, **named: Any) -> Any:
        seen["preemptions"] += 1
        return preempt(*arguments, **named)

    scheduler.schedule, scheduler._preempt_request = watched_schedule, watched_preempt
    return seen


def _shut_down(llm: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    if llm is not None:
        llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()


def _forget_earlier_jobs() -> None:
    from engine_harness import probe
    from vllm_attn_plugin.settings import settings

    probe.reset()
    settings.cache_clear()


def run_job(job: Job) -> Outcome:
    """Start an engine, run the passes, ask the probe, and shut the engine down."""
    with _environment(IN_PROCESS | job.variables):
        _forget_earlier_jobs()
        llm = None
        try:
            llm = _make_llm(job)
            cache = _watch_cache(llm)
            passes = [_run_pass(llm, one) for one in job.passes]
            (report,) = llm.collective_rpc("attention_report")
            return Outcome(passes, report, cache, os.getpid())
        finally:
            _shut_down(llm)


def run_refused_job(job: Job) -> Refusal | None:
    """Start an engine that should not start; None if it did."""
    with _environment(IN_PROCESS | job.variables):
        _forget_earlier_jobs()
        try:
            llm = _make_llm(job)
        except Exception as error:
            return _describe_refusal(error)
        else:
            _shut_down(llm)
            return None
        finally:
            _shut_down(None)


def _describe_refusal(error: BaseException) -> Refusal:
    chain: list[BaseException] = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(earlier)
    ours = [name for one in chain for name in _our_frames(one.__traceback__)]
    named = [(type(one).__qualname__, str(one)) for one in chain]
    return Refusal(*named[0], ours=ours, chain=named[1:])


def _our_frames(traceback: TracebackType | None) -> list[str]:
    frames = []
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        if module.split(".")[0] == "vllm_attn_plugin":
            frames.append(f"{module}.{traceback.tb_frame.f_code.co_name}")
        traceback = traceback.tb_next
    return frames


def start_child(paths: Sequence[str]) -> None:
    """Make a fresh process ready to run jobs; it inherits the test process's environment and nothing else."""
    sys.path[:0] = [path for path in paths if path not in sys.path]
    os.environ.update(clean_environment({}))
