"""The evidence: which runs there are, how they are judged, the table of the document, and what runs on a GPU."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from ci.accuracy import __main__ as gate
from ci.accuracy import evidence
from ci.accuracy.configuration import settings_for
from ci.accuracy.evidence_runs import ORDER, SOUND, Case, cases_of, engine_of, is_done
from ci.accuracy.evidence_table import DOCUMENT, documents, filled, table_of
from ci.accuracy.faults.catalogue import FAULTS
from ci.accuracy.faults.hook import VARIABLE
from ci.gpu import accuracy as gpu
from ci.gpu.logprobs import Row, Served
from ci.gpu.shapes import SHAPES


@pytest.fixture
def models(monkeypatch):
    """Folders in place of models that would have to be prepared."""
    monkeypatch.setattr("ci.accuracy.configuration.prepare", lambda name: Path("folder") / name)
    monkeypatch.setattr("ci.accuracy.__main__.prepare", lambda name: Path("folder") / name)


def samples(task_ids, text="same", log_likelihood=-1.0):
    return {
        task: [
            {
                "doc_id": number,
                "filter": "none",
                "prompt_hash": str(number),
                "metrics": {},
                "is_generated": True,
                "prediction": text,
                "log_likelihoods": [log_likelihood],
                "characters": [4],
            }
            for number in ids
        ]
        for task, ids in task_ids.items()
    }


class TestCases:
    def test_cpu_runs_of_one_seed(self):
        runs = {(case.what, case.group) for case in cases_of("gemma", [1], 2)}
        assert {(SOUND, "baseline"), (SOUND, "custom"), (SOUND, "drafts"), (ORDER, "baseline")} < runs
        assert {what for what, _ in runs} - {SOUND, ORDER} == {n for n, f in FAULTS.items() if "cpu" in f.acts_on}
        assert ("draft-mask", "drafts") in runs
        assert ("scale", "custom") in runs

    def test_on_a_gpu_there_is_a_second_baseline_and_faults_run_without_graphs(self):
        cases = cases_of("smollm2", [1], 0, "gpu")
        assert Case("smollm2", 1, SOUND, "peer") in cases
        groups = {fault: {case.group for case in cases if case.what == fault} for fault in FAULTS}
        assert groups["scale"] == groups["dirty-counters"] == {"faulty", "flashinfer"}
        assert groups["kv-dtype"] == {"faulty"}
        assert groups["prefill-indptr"] == {"flashinfer"}
        assert (groups["draft-mask"], groups["table-by-tokens"]) == ({"drafts"}, {"flashinfer-drafts"})
        assert engine_of("flashinfer-drafts", "gpu")[1]["speculative_config"]
        assert engine_of("faulty", "gpu")[1]["enforce_eager"]
        assert engine_of("custom", "gpu") == ("CUSTOM", {})
        assert engine_of("peer", "gpu")[0] == "FLASHINFER"

    def test_faults_are_asked_for_a_part_of_the_baselines_items(self, models):
        from vllm_attn_plugin.accuracy.items import draw

        shares = [Case("smollm2", 3, what, "custom").share for what in (SOUND, "scale")]
        whole, part = (settings_for("smollm2", "cpu", 3, share=share).tasks for share in shares)
        for one, other in zip(whole, part, strict=True):
            assert other.limit < one.limit or one.limit == 1
            assert set(draw(96, other.limit, "3-x")) <= set(draw(96, one.limit, "3-x"))


class TestJudging:
    def put(self, folder, case, document, name="samples.json"):
        (folder / case.folder).mkdir(parents=True)
        (folder / case.folder / name).write_text(json.dumps(document))

    @pytest.fixture
    def chosen(self, models, monkeypatch):
        from vllm_attn_plugin.accuracy.items import Chosen

        ids = {"t": [0, 1, 2, 3]}
        monkeypatch.setattr(evidence, "choose_items", lambda settings: Chosen(ids, {"t": {}}))
        return ids

    def judged(self, folder, case):
        (row,) = evidence.judge_all([Case("gemma", 1, SOUND, "baseline"), case], folder, "cpu")
        return row

    def test_sound_run_that_agrees(self, tmp_path, chosen):
        case = Case("gemma", 1, SOUND, "custom")
        self.put(tmp_path, Case("gemma", 1, SOUND, "baseline"), {"tasks": samples(chosen)})
        self.put(tmp_path, case, {"tasks": samples(chosen)})
        row = self.judged(tmp_path, case)
        assert (row["verdict"], row["as_it_should"], row["against"]) == ("pass", True, "CPU_ATTN")

    def test_fault_that_is_found_and_one_that_is_missed(self, tmp_path, chosen):
        self.put(tmp_path, Case("gemma", 1, SOUND, "baseline"), {"tasks": samples(chosen)})
        found, missed = Case("gemma", 1, "scale", "custom"), Case("gemma", 1, "window", "custom")
        self.put(tmp_path, found, {"tasks": samples(chosen, text="another")})
        self.put(tmp_path, missed, {"tasks": samples(chosen)})
        assert [(r["verdict"], r["as_it_should"]) for r in (self.judged(tmp_path, c) for c in (found, missed))] == [
            ("fail", True),
            ("pass", False),
        ]

    def test_false_alarm(self, tmp_path, chosen):
        case = Case("gemma", 1, ORDER, "baseline", 1)
        self.put(tmp_path, Case("gemma", 1, SOUND, "baseline"), {"tasks": samples(chosen)})
        self.put(tmp_path, case, {"tasks": samples(chosen, log_likelihood=-1.1)})
        row = self.judged(tmp_path, case)
        assert (row["verdict"], row["as_it_should"]) == ("fail", False)

    def test_engine_that_stopped(self, tmp_path, chosen):
        case = Case("gemma", 1, "kv-dtype", "custom")
        self.put(tmp_path, Case("gemma", 1, SOUND, "baseline"), {"tasks": samples(chosen)})
        self.put(tmp_path, case, {"error": "BatchError: page"}, "error.json")
        row = self.judged(tmp_path, case)
        assert (row["verdict"], row["as_it_should"], row["found"]) == ("fail", True, ["BatchError: page"])

    def test_baseline_with_more_items_is_cut_to_those_compared(self, tmp_path, chosen):
        case = Case("gemma", 1, SOUND, "custom")
        self.put(tmp_path, Case("gemma", 1, SOUND, "baseline"), {"tasks": samples({"t": [0, 1, 2, 3, 4, 5]})})
        self.put(tmp_path, case, {"tasks": samples(chosen)})
        assert self.judged(tmp_path, case)["answers"]["t"]["items"] == 4

    def test_run_without_a_baseline_waits(self, tmp_path, chosen):
        case = Case("gemma", 1, SOUND, "custom")
        self.put(tmp_path, case, {"tasks": samples(chosen)})
        assert evidence.judge_all([case], tmp_path, "cpu") == []
        assert is_done(case, tmp_path)


class TestTable:
    def row(self, what, verdict, seed=1, **more):
        answers = {"t": {"items": 4, "differing": 2 if verdict == "fail" else 0, "largest": 0.5, "mean": 0.1}}
        scores = {"t acc": [0.75, 0.25 if verdict == "fail" else 0.75]}
        row = {"model": "gemma", "seed": seed, "what": what, "drafts": False, "verdict": verdict}
        return row | {"answers": answers, "scores": scores} | more

    def document(self, *rows):
        return {"machine": "a CPU", "date": "2026-01-02T03", "rows": list(rows)}

    def test_cells(self):
        table = table_of(
            self.document(self.row("scale", "fail"), self.row("scale", "fail", 2), self.row(SOUND, "pass"))
        )
        assert "a CPU, 2026-01-02, seeds 1, 2." in table
        lines = table.splitlines()
        assert lines[4] == "| nothing | - | 0 of 1 fail; log-likelihoods apart by 0.5 at most |"
        assert "| 2 of 2 fail; t acc 0.75 to 0.25; 50% of the answers changed; log-likelihoods apart by 0.5" in lines[5]

    def test_numbers_that_are_none_and_engines_that_stopped(self):
        nan = self.row("kv-dtype", "fail")
        nan["answers"]["t"]["largest"] = "nan"
        stopped = {"model": "gemma", "seed": 2, "what": "kv-dtype", "drafts": False, "verdict": "fail"}
        table = table_of(self.document(nan, stopped))
        assert "log-likelihoods that are no numbers; 1 engines stopped" in table

    def test_kernels_of_flashinfer_and_the_second_baseline_have_lines_of_their_own(self):
        rows = [
            self.row("scale", "fail", group="faulty"),
            self.row("scale", "fail", group="flashinfer"),
            self.row(SOUND, "pass", against="FLASHINFER"),
            self.row(SOUND, "pass", against="FLASH_ATTN"),
        ]
        titles = [line.split(" | ")[0] for line in table_of(self.document(*rows)).splitlines()[4:]]
        scale = FAULTS["scale"].says
        assert titles == [
            "| nothing",
            "| nothing, against FLASHINFER",
            f"| {scale}",
            f"| {scale}, FlashInfer's kernels",
        ]

    def test_only_what_stands_between_the_marks_is_written(self):
        text = "a\n<!-- table of m -->\nold\n<!-- end of m -->\nb\n"
        new = filled(text, {"m": self.document(self.row(SOUND, "pass")), "other": self.document()})
        assert new.startswith("a\n<!-- table of m -->\na CPU,")
        assert new.endswith("\n<!-- end of m -->\nb\n")
        assert "old" not in new

    def test_document_holds_the_tables_of_the_result_files(self):
        text = DOCUMENT.read_text()
        assert text == filled(text, documents()), "run python -m ci.accuracy.evidence_table"

    @pytest.mark.parametrize("machine", documents())
    def test_every_run_of_the_result_files_came_out_as_it_should(self, machine):
        rows = documents()[machine]["rows"]
        assert rows
        assert [row for row in rows if not row["as_it_should"]] == []


class TestStatus:
    @pytest.mark.parametrize(
        ("num_done", "as_it_should", "status"), [(2, True, 0), (1, True, 1), (0, True, 1), (2, False, 1)]
    )
    def test_run_that_is_not_done_or_not_as_it_should_be_fails(
        self, monkeypatch, tmp_path, num_done, as_it_should, status
    ):
        cases = [Case("gemma", seed, SOUND, "custom") for seed in (1, 2)]
        row = {"model": "gemma", "seed": 1, "what": SOUND, "as_it_should": as_it_should, "found": []}
        monkeypatch.setattr(evidence, "cases_of", lambda *_: cases)
        monkeypatch.setattr(evidence, "is_done", lambda case, _: case.seed <= num_done)
        monkeypatch.setattr(evidence, "judge_all", lambda done, *_: [row for _ in done])
        monkeypatch.setattr(evidence, "document_of", lambda *_: {})
        monkeypatch.setattr(evidence, "keep", lambda *_: tmp_path)
        assert evidence.main(["--models", "gemma", "--device", "cpu", "--judge"]) == status


class TestGate:
    def test_command_of_a_model_on_a_cpu(self, models):
        options = gate.parse(["--models", "gemma", "--device", "cpu", "--", "--seed", "7"])
        words = gate.command("gemma", options, Path("out"))
        assert words[1:4] == ["-m", "vllm_attn_plugin", "accuracy"]
        assert words[words.index("--baseline") + 1] == "CPU_ATTN"
        assert words[words.index("--config") + 1].endswith("models/gemma.yaml")
        assert json.loads(words[words.index("--engine-args") + 1])["dtype"] == "float32"
        assert json.loads(words[words.index("--candidate-args") + 1]) == {"block_size": 16}
        assert words[-2:] == ["--seed", "7"]
        assert "--concurrency" not in words

    def test_command_on_a_gpu(self, models):
        words = gate.command("gemma", gate.parse(["--device", "gpu"]), Path("out"))
        assert words[words.index("--baseline") + 1] == "FLASH_ATTN"
        assert words[words.index("--concurrency") + 1] == "64"

    def test_worst_status_of_the_models(self, models, monkeypatch):
        done = iter([0, 1])
        monkeypatch.setattr(gate.subprocess, "run", lambda *a, **k: type("Done", (), {"returncode": next(done)})())
        assert gate.main(["--device", "cpu"]) == 1


class TestGpu:
    judged = Row("llama-3-8b", "failed", [], "FLASHINFER", 1.0, 0.1, 2.0, 0.2, 50, "")

    def test_a_fault_must_be_apart_and_a_sound_run_must_not(self):
        near = Row(**(asdict(self.judged) | {"outcome": "passed"}))
        assert [gpu.row_of("c", f, j).outcome for f, j in (("scale", self.judged), ("scale", near))] == [
            "passed",
            "failed",
        ]
        assert [gpu.row_of("c", gpu.SOUND, j).outcome for j in (self.judged, near)] == ["failed", "passed"]

    def test_every_fault_has_a_case_on_which_it_can_act(self):
        tried = {fault: case for case in gpu.CASES.values() for fault in gpu.faults_of(case)}
        assert set(tried) == {gpu.SOUND, *FAULTS}
        assert tried["dirty-counters"] == "llama-3-8b"
        assert "sliding_window" in SHAPES[tried["window"]]
        assert "speculative_config" in gpu.logprobs.CASES[tried["draft-mask"]].engine

    def test_engine_of_a_fault_has_it_with_kernels_on_which_it_acts_and_no_graphs(self, tmp_path):
        before = dict(os.environ)
        variables = gpu.variables_of("prefill-indptr", tmp_path)
        assert variables[VARIABLE] == "prefill-indptr"
        assert variables["VLLM_ATTN_PLUGIN_PREFILL_KERNEL"] == "flashinfer-fa3"
        assert variables[gpu.EAGER_VARIABLE]
        assert variables["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
        assert (tmp_path / "seeded_fault.py").exists()
        assert gpu.variables_of(gpu.SOUND, tmp_path) == {}
        assert dict(os.environ) == before

    def test_ours_is_served_once_for_each_fault_and_the_others_once(self, monkeypatch, tmp_path):
        served = []

        def serve(name, backend, gpus, logs, resume, variables=None):
            served.append((backend, (variables or {}).get(VARIABLE), name))
            return Served({}, [], "")

        monkeypatch.setattr(gpu.logprobs, "serve", serve)
        monkeypatch.setattr(gpu.logprobs, "judge", lambda *a: self.judged)
        options = gpu.parse(["--logs", str(tmp_path), "--faults", gpu.SOUND, "scale"])
        rows = []
        record = type("R", (), {"add": lambda self, row: rows.append(row)})()
        for case in gpu.CASES.values():
            gpu.compare_case(case, options, record)
        served = [one for one in served if one[2] == "llama-3-8b"]
        assert [(backend, fault) for backend, fault, _ in served] == [
            ("FLASH_ATTN", None),
            ("FLASHINFER", None),
            ("CUSTOM", None),
            ("CUSTOM", "scale"),
        ]
        assert [(row.fault, row.outcome) for row in rows if row.case == "llama-3-8b"] == [
            (gpu.SOUND, "failed"),
            ("scale", "passed"),
        ]
