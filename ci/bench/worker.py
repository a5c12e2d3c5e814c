"""vLLM's worker with what `ci.bench.serve` needs inside an engine: turns with the GPU's memory, and host times."""

from typing import Any

import torch
from vllm.platforms import current_platform

from ci.bench.host_times import HostTimes
from ci.bench.start_turns import StartTurns

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

# The bound of vLLM's own, which keeps the products of many layers in range.
DUMMY_WEIGHT = 1e-3


class BenchWorker(Worker):
    """Waits for its turn with the GPU's memory while it starts, and hands it on when it is first put to sleep."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._start_turns = StartTurns()
        self._host_times: HostTimes | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's, once there is room for another engine's weights."""
        self._start_turns.take_weights()
        super().load_model(*args, **kwargs)

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's, once no other engine holds a cache."""
        self._start_turns.take_cache()
        super().initialize_from_config(*args, **kwargs)

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; then another engine may go on starting."""
        super().sleep(*args, **kwargs)
        self._start_turns.give_back()

    def bench_make_up_weights(self) -> None:
        """Fill the parameters as vLLM's dummy weights are, after a sleep that gave them up; the same each time."""
        generator = torch.Generator(self.device).manual_seed(0)
        with torch.inference_mode():
            for parameter in self.model_runner.get_model().parameters():
                parameter.uniform_(-DUMMY_WEIGHT, DUMMY_WEIGHT, generator=generator)

    def bench_facts(self) -> dict[str, Any]:
        """What really serves, and how long this engine waited for others while it started."""
        backends = {layer.get_attn_backend().get_name() for layer in self._attention_layers()}
        return {"served_by": sorted(backends), "waited_s": self._start_turns.waited_s}

    def bench_start_host_times(self) -> None:
        """Wrap the builder's and the impl's methods."""
        layers = self._attention_layers()
        impls = {type(layer.impl) for layer in layers}
        builders = {layer.get_attn_backend().get_builder_cls() for layer in layers}
        self._host_times = HostTimes({"build": builders, "forward": impls, "do_kv_cache_update": impls})
        self._host_times.start()

    def bench_stop_host_times(self) -> dict[str, dict[str, float]]:
        """Unwrap them; mean, 99th percentile and calls of each."""
        assert self._host_times is not None
        return self._host_times.stop()

    def _attention_layers(self) -> list[Any]:
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        return [layer for layer in layers if hasattr(layer, "impl") and hasattr(layer, "get_attn_backend")]
