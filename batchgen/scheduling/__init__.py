"""Which sequences run in a step and which KV blocks they hold. Integers only; imports no torch."""
