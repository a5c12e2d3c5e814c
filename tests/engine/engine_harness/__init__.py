"""What the engine tests share: prompts, jobs run in a process of their own, a probe inside the worker, a server.

Tests put this folder's parent on the path of every process they start, so that a worker can import the probe.
"""
