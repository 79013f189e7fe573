"""OpenAI's HTTP API: text and JSON outside, generations inside."""
