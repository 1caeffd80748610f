"""Attention over a step's packed tokens, as the log-sum-exp merge of parts. One backend a file."""
