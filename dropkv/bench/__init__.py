"""Benchmarks: tasks, accuracy, theory, and the report that shows them."""
