"""lm_eval's tasks as the comparison loads them, and the items it draws."""

import json
import math

import pytest

from vllm_attn_plugin.accuracy import AccuracyError
from vllm_attn_plugin.accuracy.items import bounded, choose_items, draw, load_tasks, task_manager
from vllm_attn_plugin.accuracy.settings import Settings, Side, TaskChoice

pytest.importorskip("lm_eval")

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: exact_match
"""


@pytest.fixture
def folder(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n}?", "answer": str(n)}) + "\n" for n in range(20)))
    for name, source in (("kept", data), ("lost", tmp_path / "nowhere.jsonl")):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=source))
    return str(tmp_path)


def settings(folder, *tasks, seed=1):
    return Settings("m", {"baseline": Side("A"), "candidate": Side("B")}, tasks, include_paths=(folder,), seed=seed)


def test_items_are_drawn_by_the_seed(folder):
    chosen = [choose_items(settings(folder, TaskChoice("kept", 5), seed=seed)).ids["kept"] for seed in (1, 2, 1)]
    assert chosen[0] == chosen[2] != chosen[1]
    assert chosen[0] == sorted(set(chosen[0]))
    assert len(chosen[0]) == 5


@pytest.mark.parametrize("limit", [None, 20, 500])
def test_a_limit_of_all_and_more_takes_all(folder, limit):
    assert choose_items(settings(folder, TaskChoice("kept", limit))).ids["kept"] == list(range(20))


def test_a_smaller_limit_draws_a_part_of_what_a_larger_draws():
    assert set(draw(100, 7, "s")) < set(draw(100, 30, "s")) < set(draw(100, None, "s"))


def test_examples_of_a_choice_are_the_tasks(folder):
    manager = task_manager([folder], [TaskChoice("kept")])
    assert load_tasks(manager, [TaskChoice("kept", num_fewshot=3)])["kept"].get_config("num_fewshot") == 3
    assert load_tasks(manager, [TaskChoice("kept")])["kept"].get_config("num_fewshot") is None


def test_tasks_of_lm_eval_are_looked_for_only_where_one_is_named(folder):
    assert set(task_manager([folder], [TaskChoice("kept")]).all_tasks) == {"kept", "lost"}
    assert {"kept", "gsm8k"} < set(task_manager([folder], [TaskChoice("kept"), TaskChoice("gsm8k")]).all_tasks)


def test_task_that_is_not_known_is_named_with_what_is_near(folder):
    with pytest.raises(AccuracyError, match=r"lm_eval knows no task 'kpet'; near it are kept.*: change --tasks"):
        choose_items(settings(folder, TaskChoice("kpet")))


def test_task_whose_data_is_not_there(folder):
    with pytest.raises(AccuracyError, match=r"task lost could not be loaded \(FileNotFoundError: .*leave it out"):
        choose_items(settings(folder, TaskChoice("lost")))


def test_folder_that_is_not_there(folder):
    with pytest.raises(AccuracyError, match=r"--include-path .*/no is no folder"):
        choose_items(settings(f"{folder}/no", TaskChoice("kept")))


def test_score_too_large_for_a_number_is_infinite():
    assert bounded(lambda values: math.exp(values[0]))([5000.0]) == math.inf
    assert bounded(sum)([1, 2]) == 3
