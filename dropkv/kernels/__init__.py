"""The heavy arithmetic: scores, selection, attention over prefix and tail; each with its plain torch form."""
