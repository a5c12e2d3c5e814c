"""The tasks of ci.accuracy: data made again byte for byte, loaded by lm_eval, long enough, and answerable."""

import json
import math
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from ci import models
from ci.accuracy.configuration import MODEL_FOLDER, settings_for
from ci.accuracy.generate.files import FOLDER, SOURCES, data_files
from ci.accuracy.generate.templates import fill

EXPECTED_ITEMS = {
    "attn_retrieval": 72,
    "attn_retrieval_long": 48,
    "attn_facts": 120,
    "attn_last_word": 120,
    "attn_perplexity": 8,
    "attn_window_edge": 25,
    "attn_arithmetic": 160,
    "attn_word_problems": 120,
    "attn_copy": 92,
    "attn_induction": 96,
}
TASKS = tuple(EXPECTED_ITEMS)
# Taken here, before the fixture that gives each test a cache of its own.
SMOLLM2 = models.model_dir("smollm2")
GEMMA = models.model_dir("gemma")
GEMMA_WINDOW = 512


def records(task):
    return [json.loads(line) for line in (FOLDER / f"{task}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def count_tokens():
    if not (SMOLLM2 / "tokenizer.json").is_file():
        pytest.skip("the SmolLM2 tokenizer is not prepared (python -m ci.models smollm2)")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text).ids)


def test_text_at_the_edge_of_the_window_fills_it_and_one_sign_follows():
    if not (GEMMA / "tokenizer.json").is_file():
        pytest.skip("the Gemma tokenizer is not prepared (python -m ci.models gemma)")
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(GEMMA / "tokenizer.json"))
    for record in records("window_edge"):
        text = tokenizer.encode(record["text"]).ids
        assert len(text) == 1 + GEMMA_WINDOW  # with the token that begins each text
        assert tokenizer.encode(record["text"] + record["next"]).ids[:-1] == text


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
        return manager.load(list(TASKS))["tasks"]


class TestData:
    def test_generator_makes_the_committed_bytes(self):
        made = data_files()
        committed = {path.name: path.read_bytes() for path in FOLDER.glob("*.jsonl")}
        assert made.keys() == committed.keys()
        for name, content in made.items():
            assert content == committed[name], f"{name} differs: run python -m ci.accuracy.generate"

    def test_small_in_total(self):
        files = [path for folder in (FOLDER, SOURCES) for path in folder.iterdir()]
        assert sum(path.stat().st_size for path in files) < 1_000_000

    def test_same_slot_same_word_and_distinct_within_a_kind(self):
        pools = {"city": ["Oslo", "Rome", "Bonn"]}
        for seed in range(20):
            one, two, again = fill("{city.1} {city.2} {city.1}", pools, random.Random(seed)).split()
            assert one == again
            assert one != two


class TestRetrieval:
    def test_contexts_reach_1500_tokens(self, count_tokens):
        assert min(count_tokens(record["context"]) for record in records("retrieval")) >= 1500

    def test_prompts_leave_room_for_the_answer(self, count_tokens):
        # Gemma's tokenizer needs about as many tokens; 2,048 is the engine's limit.
        longest = max(count_tokens(f"{record['context']} {record['question']}") for record in records("retrieval"))
        assert longest <= 1900

    def test_each_depth_is_asked_for_equally_often(self):
        depths = Counter(record["depth"] for record in records("retrieval"))
        assert len(depths) == 8
        assert set(depths.values()) == {9}
        assert min(depths) == 0
        assert max(depths) == 1

    def test_code_stands_in_the_context_once_at_its_depth(self):
        for record in records("retrieval"):
            sentence = f"{record['question']} {record['answer']}."
            assert record["context"].count(record["question"]) == 1
            assert record["context"].count(record["answer"]) == 1
            position = record["context"].index(sentence) / (len(record["context"]) - len(sentence))
            assert position == pytest.approx(record["depth"], abs=0.05)


class TestFacts:
    def test_one_right_answer_among_four_distinct_choices(self):
        for record in records("facts"):
            assert len(set(record["choices"])) == 4, record
            assert 0 <= record["label"] < 4

    def test_ten_subjects_of_equal_size_and_no_question_twice(self):
        facts = records("facts")
        assert set(Counter(record["subject"] for record in facts).values()) == {12}
        assert len({record["subject"] for record in facts}) == 10
        assert len({record["question"] for record in facts}) == len(facts)

    def test_right_answer_takes_every_place(self):
        places = Counter(record["label"] for record in records("facts"))
        assert min(places[place] for place in range(4)) >= 15

    def test_right_answer_is_the_one_of_the_source(self):
        rows = [line.split("\t") for line in (SOURCES / "facts.tsv").read_text().splitlines()[1:]]
        answers = {row[1]: row[2] for row in rows}
        for record in records("facts"):
            assert record["choices"][record["label"]] == answers[record["question"]]


class TestLastWord:
    def test_word_has_stood_in_the_passage_before(self):
        for record in records("last_word"):
            words = record["text"].replace("'", " ").translate(str.maketrans("", "", '.,;:!?"')).split()
            assert record["word"] in words, record

    def test_passages_differ(self):
        passages = [record["text"] for record in records("last_word")]
        assert len(set(passages)) == len(passages)
        assert len({record["story"] for record in records("last_word")}) == 40

    def test_words_are_many(self):
        assert len({record["word"] for record in records("last_word")}) >= 60


class TestPerplexity:
    def test_documents_reach_1000_tokens_and_pass_the_sliding_window(self, count_tokens):
        lengths = [count_tokens(record["text"]) for record in records("perplexity")]
        assert min(lengths) >= max(1000, 2 * GEMMA_WINDOW - 24)

    def test_no_verse_reference_is_left(self):
        for record in records("perplexity"):
            assert not any(character.isdigit() for character in record["text"])


class TestArithmetic:
    def test_answers_are_right_and_none_is_below_0(self):
        for record in records("arithmetic"):
            one, sign, other = record["question"].split()
            expected = {"+": int(one) + int(other), "-": int(one) - int(other), "*": int(one) * int(other)}[sign]
            assert int(record["answer"]) == expected >= 0

    def test_no_question_twice_and_all_three_signs(self):
        questions = [record["question"] for record in records("arithmetic")]
        assert len(set(questions)) == len(questions)
        assert set(Counter(question.split()[1] for question in questions).values()) == {56}


class TestWordProblems:
    def test_each_step_is_right_and_the_last_is_the_answer(self):
        for record in records("word_problems"):
            steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", record["answer"])
            assert len(steps) >= 2
            for left, sign, right, result in steps:
                one, other = int(left), int(right)
                expected = {"+": one + other, "-": one - other, "*": one * other, "/": one / other}[sign]
                assert int(result) == expected, record
            assert record["answer"].endswith(f"\n#### {steps[-1][3]}")

    def test_no_problem_twice_and_every_kind(self):
        questions = [record["question"] for record in records("word_problems")]
        assert len(set(questions)) == len(questions)
        kinds = ("dollars left", "equal parts", "working days", "years old")
        assert [sum(kind in question for question in questions) for kind in kinds] == [32, 32, 32, 32]

    def test_names_in_the_steps_are_those_of_the_question(self):
        for record in records("word_problems"):
            for name in re.findall(r"\b([A-Z][a-z]+) is \d", record["answer"]):
                assert name in record["question"]


class TestLists:
    def test_no_word_twice_in_a_list_to_copy(self):
        for record in records("copy"):
            words = record["words"].split(", ")
            assert len(words) == len(set(words)) == 20

    def test_what_follows_stands_in_the_text(self):
        for record in records("induction"):
            words, again = record["text"].split(), record["again"].split()
            assert words[:60] == words[60:] + again
            assert len(set(words[:60])) == 60


class TestModels:
    @pytest.mark.parametrize("path", sorted(MODEL_FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
    def test_files_name_tasks_of_ours_with_limits_below_their_items(self, path, monkeypatch):
        monkeypatch.setattr("ci.accuracy.configuration.prepare", lambda name: Path("folder") / name)
        settings = settings_for(path.stem, "cpu", seed=1)
        assert settings.concurrency >= 32
        for task in settings.tasks:
            assert 0 < task.limit <= EXPECTED_ITEMS[task.name]
        # Enough to fill the batch: all that generates is asked at once.
        generating = {"attn_arithmetic", "attn_word_problems", "attn_copy", "attn_retrieval"}
        assert sum(task.limit for task in settings.tasks if task.name in generating) >= settings.concurrency

    def test_a_share_of_the_items(self, monkeypatch):
        monkeypatch.setattr("ci.accuracy.configuration.prepare", lambda name: Path("folder") / name)
        whole, part = (settings_for("smollm2", "cpu", 1, share=share) for share in (1.0, 0.4))
        assert [task.limit for task in part.tasks] == [math.ceil(0.4 * task.limit) for task in whole.tasks]


class TestLmEval:
    def test_every_task_file_is_run(self):
        assert {path.stem for path in FOLDER.glob("*.yaml")} == set(TASKS)

    @pytest.mark.parametrize("name", TASKS)
    def test_task_yields_its_items(self, tasks, name):
        assert len(list(tasks[name].test_docs())) == EXPECTED_ITEMS[name]

    def test_retrieval_asks_for_the_code_after_the_log(self, tasks):
        task = tasks["attn_retrieval"]
        document = next(iter(task.test_docs()))
        assert task.doc_to_text(document) == f"{document['context']} {document['question']}"
        assert task.doc_to_target(document) == document["answer"]

    def test_long_retrieval_is_as_long_as_the_model_reads(self, tasks, count_tokens):
        lengths = [count_tokens(document["context"]) for document in tasks["attn_retrieval_long"].test_docs()]
        assert min(lengths) > 7000
        assert max(lengths) < 8192 - 100

    def test_word_problems_are_scored_as_gsm8k_is(self, tasks):
        task = tasks["attn_word_problems"]
        document = next(iter(task.test_docs()))
        answer = document["answer"].split("#### ")[1]
        assert task.process_results(document, [answer]) == {"exact_match": 1.0}
        assert task.process_results(document, ["1" + answer]) == {"exact_match": 0.0}

    @pytest.mark.parametrize("name", ["attn_arithmetic", "attn_word_problems", "attn_copy"])
    def test_examples_are_none_of_the_items(self, tasks, name):
        task = tasks[name]
        assert not [document for document in task.fewshot_docs() if document in list(task.test_docs())]

    def test_facts_offer_four_choices(self, tasks):
        task = tasks["attn_facts"]
        document = next(iter(task.test_docs()))
        assert task.doc_to_choice(document) == document["choices"]
        assert task.doc_to_target(document) == document["label"]

    def test_last_word_follows_after_a_blank(self, tasks):
        task = tasks["attn_last_word"]
        document = next(iter(task.test_docs()))
        assert not task.doc_to_text(document).endswith(" ")
        assert task.doc_to_target(document) == f" {document['word']}"

    def test_perplexity_scores_the_whole_text(self, tasks):
        task = tasks["attn_perplexity"]
        document = next(iter(task.test_docs()))
        assert task.doc_to_target(document) == document["text"]
