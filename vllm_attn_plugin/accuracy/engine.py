"""The models that lm_eval asks: vLLM with one attention backend, or a server."""

import random
from typing import Any

from lm_eval.models.vllm_causallms import VLLM

from vllm_attn_plugin.accuracy.recorded import scored_text


class ShuffledVLLM(VLLM):
    """lm_eval's vLLM model, but asked in an order of its own, and with the log-likelihood of what it generates.

    lm_eval sorts requests by length, so that batches would be the same whatever order they are asked in.
    """

    def __init__(self, order: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._rng = random.Random(order)
        self._log_likelihoods: dict[tuple[int, ...], float | None] = {}

    def reorder(self, order: str) -> None:
        """Ask in another order from now on."""
        self._rng = random.Random(order)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """See lm_eval; the texts carry their log-likelihood where the prompt was not cut to fit."""
        self._log_likelihoods.clear()
        texts = super().generate_until(requests, disable_tqdm=disable_tqdm)
        prompts = self.tok_encode([request.args[0] for request in requests])
        return [
            scored_text(text, self._log_likelihoods.get(tuple(prompt)))
            for text, prompt in zip(texts, prompts, strict=True)
        ]

    def _model_generate(self, requests: list[list[int]], generate: bool = False, sampling_params: Any = None) -> Any:
        order = self._rng.sample(range(len(requests)), len(requests))
        if generate:
            for one in sampling_params:
                one.logprobs = 0  # of the chosen token alone
            sampling_params = [sampling_params[number] for number in order]
        asked = [requests[number] for number in order]
        outputs = super()._model_generate(asked, generate=generate, sampling_params=sampling_params)
        if generate:
            for prompt, output in zip(asked, outputs, strict=True):
                self._log_likelihoods[tuple(prompt)] = output.outputs[0].cumulative_logprob
        return [output for _, output in sorted(zip(order, outputs, strict=True), key=lambda pair: pair[0])]


def make_engine(model: str, backend: str, engine_args: dict[str, Any], concurrency: int, order: str) -> ShuffledVLLM:
    """Start vLLM in this process with one attention backend."""
    arguments = {
        "max_num_seqs": concurrency,
        # Offline engines are silent otherwise, and then nothing says how many requests were in flight.
        "disable_log_stats": False,
        **engine_args,
    }
    return ShuffledVLLM(order, pretrained=model, attention_backend=backend, batch_size="auto", **arguments)


def make_client(model: str, tokenizer: str, url: str, concurrency: int) -> Any:
    """A client of a server's completions."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        base_url=f"{url.rstrip('/')}/v1/completions",
        model=model,
        tokenizer=tokenizer or model,
        tokenizer_backend="huggingface",
        num_concurrent=concurrency,
        batch_size=1,
        max_retries=2,
    )
