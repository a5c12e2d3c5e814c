"""Accuracy of one backend against another: lm_eval's tasks on both, the same items paired, a verdict.

Nothing here imports lm_eval, scipy or vLLM at the top of a file, but for `engine` and `recorded`, which only the
process of one side imports.
"""


class AccuracyError(ValueError):
    """The comparison cannot be made as asked; the message says what to change."""
