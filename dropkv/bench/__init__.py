"""Benches: tasks, accuracy, theory, speed, report (extra `bench`)."""
