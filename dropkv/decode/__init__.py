"""Answering many questions at once over shared prefixes."""
