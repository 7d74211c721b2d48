"""Benchmarks: each prints a table with ratios against a real peer in the same run, and writes build/bench/NAME.json."""
