"""Many recipes of the question-free compression measured on the same documents at once: `python -m benchmarks.question_free --help`."""
