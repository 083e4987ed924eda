"""The command line: one module per verb, nothing but options, progress and printing."""
