"""From logits to tokens: penalties, filters, grammars, random numbers, log-probabilities, stop conditions."""
