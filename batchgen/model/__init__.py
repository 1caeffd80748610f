"""A transformers model: loaded, checked, adapted to packed steps, and run."""
