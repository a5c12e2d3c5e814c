"""ci.accuracy without an engine: reading lm_eval's files, judging, the table, the JSON, and who served a run."""

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ci.accuracy import __main__ as accuracy
from ci.accuracy.compare import Agreement, allowed_difference, blind_tasks, compare, judge, judge_items
from ci.accuracy.lm_eval_run import Finished, Run, execute, log_lines, most_in_flight, served_by
from ci.accuracy.progress import latest_stage
from ci.accuracy.report import table, verdict_sentence
from ci.accuracy.results import Score, parse_item, parse_scores, read_results
from ci.console import UserError
from ci.machine import Machine

# Six items of each task as lm_eval 0.4.13 wrote them, without the documents and this or that machine's paths.
SAMPLES = Path(__file__).parent / "accuracy_samples"
KERNELS = "prefill=reference, decode=reference (the torch reference serves cpu devices)."
KERNEL_LINE = f"(Worker pid=7) INFO 11-30 11:23:42 [builder.py:125] Attention kernels: {KERNELS}"


@pytest.fixture
def samples(tmp_path):
    """A copy of the sample output that a test may change."""
    return Path(shutil.copytree(SAMPLES, tmp_path / "samples"))


def change_result(folder, task, key, value):
    path = next(folder.glob("results_*.json"))
    document = json.loads(path.read_text())
    assert key in document["results"][task]
    document["results"][task][key] = value
    path.write_text(json.dumps(document))


def change_sample(folder, task, number, change):
    path = next(folder.glob(f"samples_{task}_*.jsonl"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines[number])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def rows_against(folder, dtype="float32"):
    """The sample output as the baseline, the folder's as the candidate."""
    return compare("smollm2", read_results(SAMPLES, accuracy.TASKS), read_results(folder, accuracy.TASKS), dtype)


def row_of(rows, task, metric):
    return next(row for row in rows if (row.task, row.metric) == (task, metric))


class TestReading:
    def test_scores_and_standard_errors(self):
        results = read_results(SAMPLES, accuracy.TASKS)
        assert results["attn_retrieval"].scores["exact_match"] == Score(pytest.approx(1 / 6), pytest.approx(1 / 6))
        assert set(results["attn_last_word"].scores) == {"acc", "perplexity"}
        assert results["attn_last_word"].scores["perplexity"].stderr == pytest.approx(5.6057, abs=1e-3)

    def test_stderr_not_estimated_is_none(self):
        scores = read_results(SAMPLES, accuracy.TASKS)["attn_perplexity"].scores
        assert scores["word_perplexity"].stderr is None
        assert scores["word_perplexity"].value == pytest.approx(28.7118, abs=1e-3)

    def test_filter_of_a_metric_finds_its_own_stderr(self):
        result = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1, "acc,strict": 0.25, "acc_stderr,strict": "N/A"}
        assert parse_scores({"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": "a"}) == {"acc": Score(0.5, 0.1)}
        with pytest.raises(UserError, match=r"acc with more than one filter"):
            parse_scores(result)

    def test_predictions_of_each_kind_of_task(self):
        results = read_results(SAMPLES, accuracy.TASKS)
        assert results["attn_retrieval"].items[0].prediction == "11128"
        assert results["attn_facts"].items[0].prediction == "0"
        assert len(results["attn_facts"].items[0].loglikelihoods) == 4
        assert results["attn_last_word"].items[0].prediction == "another text"
        assert results["attn_perplexity"].items[0].prediction is None
        assert results["attn_perplexity"].items[0].loglikelihoods[0] < -1000

    def test_most_likely_choice_is_the_prediction(self):
        sample = {"prompt_hash": "p", "metrics": ["acc"], "filtered_resps": [["-3.0", "False"], ["-1.5", "True"]]}
        assert parse_item(sample).prediction == "1"
        assert parse_item(sample).loglikelihoods == (-3.0, -1.5)

    def test_task_missing_from_the_results(self, samples):
        with pytest.raises(UserError, match="attn_other"):
            read_results(samples, ("attn_other",))

    def test_sample_file_missing(self, samples):
        next(samples.glob("samples_attn_facts_*")).unlink()
        with pytest.raises(UserError, match="0 files samples_attn_facts_"):
            read_results(samples, accuracy.TASKS)


class TestVerdict:
    @pytest.mark.parametrize(
        ("metric", "baseline", "candidate", "passed"),
        [
            ("acc", Score(0.60, 0.04), 0.60, True),
            ("acc", Score(0.60, 0.04), 0.565, True),
            ("acc", Score(0.60, 0.04), 0.55, False),
            ("acc", Score(0.60, 0.04), 0.65, False),
            ("acc", Score(0.60, 0.04), float("nan"), False),
            ("acc", Score(1.00, 0.00), 0.99, False),
            ("acc", Score(1.00, 0.00), 1.00, True),
            ("acc", Score(0.60, None), 0.60, True),
            ("acc", Score(0.60, None), 0.61, False),
            ("perplexity", Score(30.0, 6.0), 30.029, True),
            ("perplexity", Score(30.0, 6.0), 30.031, False),
            ("word_perplexity", Score(20.0, None), 19.981, True),
            ("word_perplexity", Score(20.0, None), 19.979, False),
            ("byte_perplexity", Score(2.0, None), float("inf"), False),
            ("byte_perplexity", Score(float("nan"), None), 2.0, False),
        ],
    )
    def test_judge(self, metric, baseline, candidate, passed):
        assert judge(metric, baseline, Score(candidate, baseline.stderr)) is passed

    def test_candidates_own_error_excuses_nothing(self):
        assert not judge("acc", Score(0.6, 0.01), Score(0.7, 0.2))

    def test_allowed_difference(self):
        assert allowed_difference("acc", Score(0.6, 0.04)) == 0.04
        assert allowed_difference("word_perplexity", Score(20.0, 3.0)) == pytest.approx(0.02)


class TestItems:
    @pytest.mark.parametrize(
        ("differing", "gap", "faults"),
        [
            (0, None, []),
            (1, None, []),
            (2, None, ["predictions differ"]),
            (None, 0.0007, []),
            (None, 0.02, ["likelihoods differ"]),
            (None, float("nan"), ["likelihoods differ"]),
            (0, 0.02, ["likelihoods differ"]),
            (9, 0.02, ["predictions differ", "likelihoods differ"]),
        ],
    )
    def test_judge_items(self, differing, gap, faults):
        assert judge_items(Agreement(72, differing, gap)) == faults

    def test_equal_scores_do_not_hide_other_answers(self, samples):
        for number in (0, 3):
            change_sample(samples, "attn_retrieval", number, lambda sample: sample.update(filtered_resps=["55555"]))
        row = row_of(rows_against(samples), "attn_retrieval", "exact_match")
        assert row.difference == 0
        assert row.faults == ("predictions differ",)

    def test_likelihood_that_is_no_number_fails(self, samples):
        change_sample(samples, "attn_perplexity", 4, lambda sample: sample.update(filtered_resps=["nan"]))
        row = row_of(rows_against(samples), "attn_perplexity", "word_perplexity")
        assert row.faults == ("likelihoods differ",)

    def test_sixteen_bits_show_items_without_judging_them(self, samples):
        for number in (0, 3):
            change_sample(samples, "attn_retrieval", number, lambda sample: sample.update(filtered_resps=["55555"]))
        row = row_of(rows_against(samples, "bfloat16"), "attn_retrieval", "exact_match")
        assert row.passed
        assert row.agreement.differing == 2


class TestCompare:
    def test_equal_runs_pass(self):
        rows = rows_against(SAMPLES)
        assert len(rows) == 6
        assert all(row.passed and row.difference == 0 for row in rows)
        assert row_of(rows, "attn_facts", "acc").agreement.differing == 0
        assert row_of(rows, "attn_perplexity", "word_perplexity").agreement.differing is None

    def test_worse_score_fails_its_row_only(self, samples):
        change_result(samples, "attn_facts", "acc,none", 0.3)
        rows = rows_against(samples)
        assert [row.task for row in rows if not row.passed] == ["attn_facts"]
        assert row_of(rows, "attn_facts", "acc").difference == pytest.approx(0.3 - 2 / 3)

    def test_differing_predictions_are_counted_though_scores_agree(self, samples):
        def another_code(sample):
            sample["filtered_resps"] = ["55555"]

        def another_choice(sample):
            sample["filtered_resps"][1][0] = "-0.25"

        def now_greedy(sample):
            sample["filtered_resps"][0][1] = "True"

        change_sample(samples, "attn_retrieval", 0, another_code)
        change_sample(samples, "attn_retrieval", 3, another_code)
        change_sample(samples, "attn_facts", 0, another_choice)
        change_sample(samples, "attn_last_word", 2, now_greedy)
        rows = rows_against(samples)
        assert row_of(rows, "attn_retrieval", "exact_match").agreement.differing == 2
        assert row_of(rows, "attn_facts", "acc").agreement.differing == 1
        assert row_of(rows, "attn_last_word", "acc").agreement.differing == 1
        assert row_of(rows, "attn_facts", "acc").agreement.largest_gap == pytest.approx(12.363116 - 0.25, abs=1e-3)
        assert row_of(rows, "attn_retrieval", "exact_match").agreement.largest_gap is None

    def test_other_prompts_are_refused(self, samples):
        change_sample(samples, "attn_facts", 0, lambda sample: sample.update(prompt_hash="other"))
        with pytest.raises(UserError, match="attn_facts"):
            rows_against(samples)

    def test_score_at_the_end_of_its_scale_is_named(self):
        sentences = blind_tasks(rows_against(SAMPLES))
        assert len(sentences) == 1
        assert sentences[0].startswith("attn_last_word scores 0 with smollm2")


class TestTable:
    def test_both_backends_with_errors_and_verdicts(self, samples):
        change_result(samples, "attn_facts", "acc,none", 0.3)
        rows = rows_against(samples)
        lines = table(rows, "CPU_ATTN", "CUSTOM").splitlines()
        assert "CPU_ATTN" in " ".join(lines[:2])
        assert "CUSTOM" in " ".join(lines[:2])
        assert len(lines) == 3 + len(rows)
        facts = next(line for line in lines if "attn_facts" in line).rstrip()
        assert "0.6667 ± 0.2108" in facts
        assert "0.3000 ± 0.2108" in facts
        assert facts.endswith("FAIL: score differs")
        words = next(line for line in lines if "word_perplexity" in line).rstrip()
        assert "28.7118 ± n/a" in words
        assert "n/a of 6" in words
        assert words.endswith("pass")

    def test_closing_sentence_names_what_failed(self, samples):
        assert verdict_sentence(rows_against(samples)).startswith("pass: all 6 ")
        change_result(samples, "attn_facts", "acc,none", 0.3)
        assert "1 of 6" in verdict_sentence(rows_against(samples))
        assert "smollm2 attn_facts acc" in verdict_sentence(rows_against(samples))


@dataclass(frozen=True)
class Script(Run):
    """A run whose process is a few lines of Python instead of lm_eval."""

    script: str = ""

    def command(self):
        return [sys.executable, "-c", self.script]


def script(tmp_path, backend, text, timeout_s=60.0):
    folder = tmp_path / "run"
    return Script("smollm2", tmp_path / "model", backend, accuracy.TASKS, folder, timeout_s=timeout_s, script=text)


class TestRun:
    def run_of(self, tmp_path, **changes):
        return Run("smollm2", tmp_path / "model", "CUSTOM", accuracy.TASKS, tmp_path / "run", **changes)

    def test_command_asks_for_the_backend_under_load(self, tmp_path):
        command = self.run_of(tmp_path).command()
        arguments = dict(pair.split("=") for pair in command[command.index("--model_args") + 1].split(","))
        assert arguments["attention_backend"] == "CUSTOM"
        assert int(arguments["max_num_seqs"]) >= 32
        assert arguments["dtype"] == "float32"
        assert arguments["enforce_eager"] == "True"
        assert command[command.index("--batch_size") + 1] == "auto"
        assert command[command.index("--tasks") + 1] == ",".join(accuracy.TASKS)
        assert "--log_samples" in command
        assert "--limit" not in command

    def test_limit_is_passed_on(self, tmp_path):
        command = self.run_of(tmp_path, limit=3).command()
        assert command[command.index("--limit") + 1] == "3"

    def test_environment_is_offline_and_logs_the_kernels(self, tmp_path):
        environment = self.run_of(tmp_path).environment({"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "9"})
        assert environment["HF_HUB_OFFLINE"] == "1"
        assert environment["VLLM_LOGGING_LEVEL"] == "INFO"
        assert environment["VLLM_CPU_KVCACHE_SPACE"] == "9"

    def test_kernels_are_read_from_the_log(self, tmp_path):
        finished = execute(script(tmp_path, "CUSTOM", f"print({KERNEL_LINE!r}); print('Running: 37 reqs, Waiting: 4')"))
        assert finished.kernels == KERNELS
        assert finished.most_in_flight == 37

    def test_missing_kernel_line_is_a_failure(self, tmp_path):
        with pytest.raises(UserError, match="has no line 'Attention kernels:', so another backend served it"):
            execute(script(tmp_path, "CUSTOM", "print('Using CPU_ATTN backend')"))

    def test_kernel_line_in_the_baseline_is_a_failure(self, tmp_path):
        with pytest.raises(UserError, match="our backend served the baseline"):
            execute(script(tmp_path, "CPU_ATTN", f"print({KERNEL_LINE!r})"))

    def test_baseline_without_kernel_line_passes(self, tmp_path):
        assert execute(script(tmp_path, "CPU_ATTN", "print('fine')")).kernels is None

    def test_failed_run_says_status_log_and_error_lines(self, tmp_path):
        text = "print('loading'); print('KeyError: no such head size'); print('KeyError: no such head size'); exit(3)"
        with pytest.raises(UserError) as failure:
            execute(script(tmp_path, "CUSTOM", text))
        message = str(failure.value)
        assert "smollm2 with CUSTOM ended with status 3" in message
        assert str(tmp_path / "run" / "log.txt") in message
        assert message.count("no such head size") == 1
        assert "loading" not in message

    def test_failed_run_without_error_lines_shows_the_last_ones(self, tmp_path):
        with pytest.raises(UserError, match=r"  line 11$"):
            execute(script(tmp_path, "CUSTOM", "[print('line', i) for i in range(12)]; exit(1)"))

    def test_run_that_hangs_is_stopped_with_its_children(self, tmp_path):
        child = f"import time, os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(300)"
        text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
        with pytest.raises(UserError, match=r"did not end within 3 s \(--timeout\)"):
            execute(script(tmp_path, "CUSTOM", text, timeout_s=3.0))
        assert_gone(int((tmp_path / "pid").read_text()))

    def test_old_output_is_not_read_again(self, tmp_path):
        (tmp_path / "run" / "output").mkdir(parents=True)
        (tmp_path / "run" / "output" / "results_old.json").write_text("{}")
        execute(script(tmp_path, "CPU_ATTN", "print('fine')"))
        assert not (tmp_path / "run" / "output").exists()


def assert_gone(pid):
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        # A child whose parent died first is a zombie until init has waited for it.
        if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"process {pid} was left behind")


class TestLog:
    def test_progress_bars_count_as_their_last_state(self):
        assert log_lines("a\r b\r c\n\nd\r\n") == [" c", "d"]

    def test_kernel_line_behind_a_progress_bar_is_found(self, tmp_path):
        run = Run("smollm2", tmp_path, "CUSTOM", accuracy.TASKS, tmp_path)
        assert served_by(run, f"Processed prompts: 3%|x| 1/64\r{KERNEL_LINE}\n") == KERNELS

    def test_largest_number_in_flight(self):
        assert most_in_flight("Running: 3 reqs\nRunning: 41 reqs\nRunning: 0 reqs") == 41
        assert most_in_flight("nothing") is None

    def test_stage_of_the_last_message(self):
        text = "INFO [evaluator:589] Running generate_until requests\nRunning loglikelihood requests: 3%|"
        assert latest_stage(text) == "generating"
        assert (
            latest_stage(f"{text}\nINFO [evaluator:589] Running loglikelihood_rolling requests")
            == "scoring whole texts"
        )
        assert latest_stage("Processed prompts") is None


class TestMachine:
    @pytest.mark.parametrize(
        ("kind", "name", "label"),
        [
            ("cpu", "AMD EPYC", "cpu-amd-epyc"),
            ("cpu", "AMD EPYC 9654 96-Core Processor", "cpu-amd-epyc-9654"),
            ("cpu", "Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz", "cpu-intel-xeon-platinum-8370c"),
            ("gpu", "NVIDIA H200", "nvidia-h200"),
        ],
    )
    def test_label(self, kind, name, label):
        assert Machine(kind, name, 1).label == label


class TestMain:
    @pytest.fixture
    def outputs(self, monkeypatch, samples, tmp_path):
        """Stand in for lm_eval: the baseline writes the samples, the candidate the test's copy of them."""
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text("{}")

        def stand_in(run):
            shutil.rmtree(run.output, ignore_errors=True)
            shutil.copytree(samples if run.backend == "CUSTOM" else SAMPLES, run.output)
            return Finished(run, 12.3, KERNELS if run.backend == "CUSTOM" else None, 41)

        monkeypatch.setattr(accuracy, "execute", stand_in)
        monkeypatch.setattr(accuracy, "this_machine", lambda kind: Machine(kind, "AMD EPYC", 2))
        monkeypatch.setattr(accuracy, "RESULTS", tmp_path / "results")
        return samples

    def main(self, monkeypatch, tmp_path, *arguments):
        command = ["ci.accuracy", "--device", "cpu", "--model", str(tmp_path / "model"), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        return accuracy.main()

    def test_equal_runs_end_with_0_and_a_result_without_paths(self, outputs, monkeypatch, tmp_path, capsys):
        assert self.main(monkeypatch, tmp_path) == 0
        assert "pass: all 6" in capsys.readouterr().out
        text = (tmp_path / "results" / "cpu-amd-epyc" / "accuracy.json").read_text()
        for secret in (str(tmp_path), str(Path.home()), sys.executable, str(Path.cwd())):
            assert secret not in text
        document = json.loads(text)
        assert document["passed"] is True
        assert [run["kernels"] for run in document["runs"]] == [None, KERNELS]
        assert document["machine"] == {"kind": "cpu", "name": "AMD EPYC", "count": 2, "driver": None}
        assert set(document["versions"]) == {"python", "vllm", "torch", "lm_eval", "plugin"}
        assert document["rows"][0]["baseline"] == {"value": pytest.approx(1 / 6), "stderr": pytest.approx(1 / 6)}

    def test_worse_candidate_ends_with_1_and_is_kept(self, outputs, monkeypatch, tmp_path, capsys):
        change_result(outputs, "attn_perplexity", "word_perplexity,none", 29.0)
        output = tmp_path / "kept.json"
        assert self.main(monkeypatch, tmp_path, "--output", str(output)) == 1
        assert "FAIL: 1 of 6" in capsys.readouterr().out
        assert json.loads(output.read_text())["passed"] is False

    def test_command_that_repeats_it_names_every_option(self, outputs, monkeypatch, tmp_path):
        self.main(monkeypatch, tmp_path, "--limit", "2", "--baseline", "torch_sdpa", "--tasks", "attn_facts")
        document = json.loads((tmp_path / "results" / "cpu-amd-epyc" / "accuracy.json").read_text())
        assert "--limit 2" in document["command"]
        assert "--tasks attn_facts" in document["command"]
        assert document["baseline"] == "TORCH_SDPA"

    def test_unknown_model_is_one_sentence(self, outputs, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["ci.accuracy", "--device", "cpu", "--model", "smollm9"])
        with pytest.raises(UserError, match=r"'smollm9' is neither one of smollm2, gemma nor a folder"):
            accuracy.main()

    @pytest.mark.parametrize("arguments", [["--tasks", "attn_poetry"], ["--limit", "0"], ["--max-num-seqs", "many"]])
    def test_bad_option_is_refused_by_name(self, outputs, monkeypatch, tmp_path, capsys, arguments):
        with pytest.raises(SystemExit):
            self.main(monkeypatch, tmp_path, *arguments)
        error = capsys.readouterr().err
        assert arguments[0] in error
        assert arguments[1] in error
        assert "Traceback" not in error

    def test_machine_label_cannot_leave_the_results(self, outputs, monkeypatch, tmp_path):
        with pytest.raises(UserError, match="--machine"):
            self.main(monkeypatch, tmp_path, "--machine", "../elsewhere")
