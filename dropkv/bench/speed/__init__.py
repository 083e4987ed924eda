"""Speed and memory of compressing and of answering, beside transformers with its full cache, in one run."""
