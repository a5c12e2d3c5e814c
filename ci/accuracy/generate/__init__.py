"""Makes the tasks' data from the texts in ci/accuracy/sources: seeded, so that each run writes the same bytes."""
