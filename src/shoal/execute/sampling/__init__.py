"""From logits to tokens: penalties, logit biases, sampling, log-probabilities, and prompt outputs."""
