"""Attention over a step's packed tokens, as the log-sum-exp merge of parts. One backend a file; The oracle of the tests is `tests/support/reference_attention.py`."""
