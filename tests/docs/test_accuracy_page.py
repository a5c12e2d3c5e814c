"""What the page on accuracy says of the window's edge in 16 bits is what the result file holds."""

from documents import ROOT, result

RESULT = result("cpu-amd-epyc/window_edge_bf16.json")
TEXT = " ".join((ROOT / "docs/accuracy.md").read_text(encoding="utf-8").split())


def test_window_one_key_too_wide_fails_in_bfloat16_and_sound_backends_pass() -> None:
    assert [(row["fault"], row["passed"]) for row in RESULT["rows"]] == [("no fault", True), ("window", False)]
    assert {side["dtype"] for side in RESULT["sides"].values()} == {"bfloat16"}


def test_distances_at_the_edge_of_the_window_are_those_of_the_file() -> None:
    sound, faulty = (row["agreements"][0]["mean_gap"] for row in RESULT["rows"])
    limit = RESULT["thresholds"]["mean_gap"]
    assert f"are {sound:.2f} nats apart in the mean there and {faulty:.2f} with the fault, where {limit}" in TEXT
