"""The engine: requests and their prefix plan in, results out. Token ids only; knows nothing of files."""
