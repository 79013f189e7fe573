"""The OpenAI-compatible HTTP face: text above, tokens below."""
