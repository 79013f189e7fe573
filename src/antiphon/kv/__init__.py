"""KV blocks beyond the engine: host tier, shared store, and when to use which."""
