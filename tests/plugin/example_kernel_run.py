"""With the example kernel installed: what the dispatch chooses and what a step through builder and impl gives."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from batch_specs import SPECS
from paged_cases import assert_close_to_formula, make_layer
from vllm_doubles import (
    common_metadata,
    forward,
    make_builder,
    make_case,
    make_config,
    make_layer_double,
    make_spec,
)

from vllm_attn_plugin import batch_file, tune
from vllm_attn_plugin.checked import CheckedMetadataBuilder
from vllm_attn_plugin.kernels import Phase, Shelf, choose, known_kernels
from vllm_attn_plugin.kernels.timed_batch import decode_point, engine_of, layer_of
from vllm_attn_plugin.kernels.timing import Runner
from vllm_attn_plugin.kernels.tuning import Configuration, write_table
from vllm_attn_plugin.replay import replay_file

CPU = torch.device("cpu")
NAME = "example-sdpa"
CONFIGURATION = Configuration(4, 2, 64, 16, "bfloat16", "bfloat16", 1)


def served_steps() -> dict[str, str]:
    """The decode kernel of each kind of step, each step's output held against fp64."""
    found = {}
    for name in ("decode", "mixed", "spec_decode_3", "padded_rows", "full_cache_decode"):
        for window in (-1, 20):
            case = make_case(SPECS[name], replace(make_layer(), window_left=window))
            drafts = {"num_speculative_tokens": 2} if name == "spec_decode_3" else {}
            layer = make_layer_double(case)
            metadata = make_builder(case, {"layer": layer}, **drafts).build(0, common_metadata(case))
            assert_close_to_formula(case, forward(layer, case, metadata))
            decode = metadata.plans[layer.impl.params].decode
            found[f"{name} {window}"] = "none" if decode is None else decode.kernel.name
    return found


def tuned(folder: Path) -> dict[str, object]:
    """Measure both kernels of the CPU's rule with a told clock, write the table, and choose by it."""
    order: list[str] = []
    prepare = tune.prepare

    def watched(shape: tune.Shape, name: str) -> Runner:
        runner = prepare(shape, name)

        def replay() -> object:
            order.append(name)
            return runner.replay()

        return replace(runner, replay=replay, blank=None)  # the told times are the kernel's alone

    class Told:
        """The example is always the faster."""

        def replay_us(self, runner: Runner) -> float:
            runner.replay()
            is_example = order[-1] == NAME
            return (1.0 if is_example else 2.0) * runner.layers

        def plan_us(self, runner: Runner) -> float:
            runner.plan()
            return 1.0

    tune.prepare = watched
    found = tune.tune(CONFIGURATION, [1, 2], [16, 40], CPU, Told(), 1 << 30)
    table = found.table("a CPU", "")
    write_table(table, folder, {})
    engine = replace(engine_of(decode_point(CONFIGURATION, 2, 40), CPU), tables=Shelf("a CPU", "", (folder,)))
    choice = choose(Phase.DECODE, layer_of(CONFIGURATION), engine)
    return {"timings": [asdict(one) for one in table.timings], "choice": str(choice), "reason": choice.reason}


def replayed() -> dict[str, object]:
    """A step that check mode wrote down, run again with the example."""
    case = make_case(SPECS["mixed"], make_layer())
    layers = {"a": make_layer_double(case)}
    builder = CheckedMetadataBuilder(make_spec(case), list(layers), make_config(layers), CPU)
    record = builder._record(builder._step(common_metadata(case)))
    found = replay_file(batch_file.write(record), NAME)
    return {"fine": found.is_fine, "kernels": {one.phase: one.kernel for one in found.ran}}


def main() -> None:
    """Print one JSON document: the steps; with a folder for tables also what replay and tune make of the kernel."""
    document: dict[str, object] = {"kernels": list(known_kernels()), "steps": served_steps()}
    if sys.argv[1:]:
        document |= {"replayed": replayed(), "tuned": tuned(Path(sys.argv[1]))}
    print("FOUND " + json.dumps(document))


if __name__ == "__main__":
    main()
