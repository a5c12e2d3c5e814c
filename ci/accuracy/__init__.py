"""Accuracy of the plugin's backend: lm_eval on our own tasks, with the backend under test and with a baseline.

`python -m ci.accuracy` runs it; see ci/accuracy/README.md.
"""
