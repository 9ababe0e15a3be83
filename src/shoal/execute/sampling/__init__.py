"""From logits to tokens: penalties, biases, sampling, and what is asked of prompts."""
