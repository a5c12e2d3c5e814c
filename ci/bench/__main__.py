"""`python -m ci.bench`, which `make bench` runs."""

from ci.bench.throughput import main
from ci.console import run_main

run_main(main)
